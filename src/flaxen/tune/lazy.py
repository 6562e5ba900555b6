"""Adapters worked into a checkpoint's tensors while these are read, so that no model is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, whole
from flaxen.convert.relation import Relation
from flaxen.convert.views import slabs
from flaxen.tune.config import read_adapter
from flaxen.tune.modules import modules
from flaxen.tune.peft import A, B, M, misfits, raise_problems, whole_weights

CHUNK = 8 << 20
"""Bytes of float32 values that are worked out at a time."""


@dataclasses.dataclass
class MergedTensor(LazyTensor):
    """W + scale * B A, and with DoRA its rows at given lengths, in float32 and rounded once.

    source: W (out, in), or (in, out) if `transposed`; a (rank, in), b (out, rank), magnitude (out,)
    or None: float32.
    """

    source: LazyTensor
    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None
    transposed: bool
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.source.shape

    def fill(self, box: Box, out: np.ndarray) -> None:
        for part, inside in slabs(box, 4, CHUNK):
            values = self._sum(part)
            if self.magnitude is not None:
                outs = part[1 if self.transposed else 0]
                ratio = (self.magnitude / self.norms)[outs]
                values = values * (ratio if self.transposed else ratio[:, None])
            out[(*inside, ...)] = values.astype(self.dtype)

    def recast(self, dtype: np.dtype) -> LazyTensor | None:
        return dataclasses.replace(self, dtype=dtype)

    def _sum(self, part: Box) -> np.ndarray:
        outs, ins = reversed(part) if self.transposed else part
        change = np.float32(self.scale) * (self.b[outs] @ self.a[:, ins])
        weight = self.source.read(part).astype(np.float32)
        return weight + (change.T if self.transposed else change)

    @cached_property
    def norms(self) -> np.ndarray:
        """The length of each row of the sum, whatever box of it is asked for."""
        squares = np.zeros(len(self.b), np.float64)
        for part, _ in slabs(whole(self.shape), 4, CHUNK):
            axis = 0 if self.transposed else 1
            squares[part[1 - axis]] += np.square(self._sum(part), dtype=np.float64).sum(axis)
        return np.sqrt(squares).astype(np.float32)


def merged_tensors(
    tensors: Mapping[str, LazyTensor],
    abstract: Any,
    relation: Relation,
    folder: str | os.PathLike[str],
) -> dict[str, LazyTensor]:
    """A checkpoint's tensors, by the names of `relation`, with the adapter of a PEFT folder worked
    in; nothing of the checkpoint is read yet.

    Raises:
        CheckpointError, ConfigError: as `tune.load_adapter`.
    """
    config, left = read_adapter(Path(folder))
    out, problems = dict(tensors), []
    for module in modules(abstract, relation):
        found = {key: left.pop(f"{module.name}.{key}", None) for key in (A, B, M)}
        found[M] = left.pop(f"{module.name}.{M}.weight", found[M])
        there = {key: x.read().astype(np.float32) for key, x in found.items() if x is not None}
        if not there:
            continue
        problems += misfits(module, config, found)
        if not problems:
            weight = f"{module.name}.weight"
            out[weight] = MergedTensor(
                tensors[weight],
                there[A],
                there[B],
                config.scale(module.name),
                there.get(M),
                module.transposed,
                tensors[weight].dtype,
            )
    for key, (_, tensor) in whole_weights(abstract, left, relation, problems).items():
        for name in (key, *(n for n in tensors if tensors[n] is tensors[key])):
            out[name] = tensor.astype(tensors[key].dtype)
    raise_problems(folder, problems, left)
    return out
