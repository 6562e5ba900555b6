"""The modules of a checkpoint as adapters see them: matrices [out, in], each of which is one of our
projections or several that share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.layout import Layout, parse
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import Join, Relation, Row, renamer
from flaxen.core.errors import ConfigError
from flaxen.core.tree import Param, paths
from flaxen.layers.linear import Embedding, Linear
from flaxen.models.fold import in_body, plain_paths

Names = Mapping[str, Any] | Relation
"""A family's table of names, which knows no parts of fused tensors, or the relation of a model."""

RANK = "lora_rank"
"""The axis inside of an adapter; no model has one of this name, as some have a `rank` of theirs."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A matrix of the checkpoint under the name of its module.

    `row` says how our projections, by label, lie in it; `ins` are the names of input axes.
    """

    name: str
    row: Row
    ins: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        return list(self.row.parts)

    def path(self, label: str) -> str:
        """The path of one of our projections."""
        return self.row.parts[label][0].removesuffix(".weight")

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        _, param = next(iter(self.row.parts.values()))
        ins = math.prod(param.axes[axis] for axis in self.ins)
        return math.prod(self.row.shape) // ins, ins

    @property
    def transposed(self) -> bool:
        """Whether the matrix lies [in, out] in the file."""
        return self._is_input(self.row.layout.dims[0])

    def split_b(self, b: np.ndarray) -> dict[str, np.ndarray]:
        """B (out, rank) -> for each label (out..., rank)."""
        return self._load(self._rows(RANK, b.shape[1]), b)

    def split_a(self, a: np.ndarray) -> dict[str, np.ndarray]:
        """A (rank, in) -> for each label (rank, in...): all share it."""
        out = {}
        for label in self.labels:
            out |= self._load(self._columns(label, len(a)), a)
        return out

    def split_magnitude(self, m: np.ndarray) -> dict[str, np.ndarray]:
        """Lengths (out,) -> for each label (out...)."""
        return self._load(self._rows(RANK, 1), m[:, None], one=True)

    def join_b(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split_b`."""
        return self._save(self._rows(RANK, next(iter(parts.values())).shape[-1]), parts)

    def join_a(self, label: str, a: np.ndarray) -> np.ndarray:
        """A (rank, in) of one label's (rank, in...)."""
        return self._save(self._columns(label, len(a)), {label: a})

    def join_magnitude(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split_magnitude`."""
        return self.join_b({label: m[..., None] for label, m in parts.items()})[:, 0]

    def outs(self, label: str) -> tuple[int, ...]:
        """The output axes of one of our projections."""
        _, param = self.row.parts[label]
        return tuple(n for axis, n in param.axes.items() if axis not in self.ins)

    def _rows(self, last: str, rank: int) -> Row:
        dims = [dim for dim in self.row.layout.dims if not self._is_input(dim)]
        params = {
            label: {a: n for a, n in param.axes.items() if a not in self.ins} | {last: rank}
            for label, (_, param) in self.row.parts.items()
        }
        return self._row((*dims, (last,)), params)

    def _columns(self, label: str, rank: int) -> Row:
        dims = [dim for dim in self.row.layout.dims if self._is_input(dim)]
        _, param = self.row.parts[label]
        axes = {RANK: rank} | {a: n for a, n in param.axes.items() if a in self.ins}
        return self._row(((RANK,), *dims), {label: axes})

    def _row(self, dims: Any, axes: Mapping[str, dict[str, int]]) -> Row:
        parts = {label: (label, Param(sizes, "")) for label, sizes in axes.items()}
        return Row(self.row.name, Layout(self.row.layout.text, tuple(dims)), parts)

    def _is_input(self, dim: tuple[Any, ...]) -> bool:
        return all(isinstance(atom, str) and atom in self.ins for atom in dim)

    def _load(self, row: Row, array: np.ndarray, one: bool = False) -> dict[str, np.ndarray]:
        found = row.load({row.name: ArrayTensor(np.ascontiguousarray(array))})
        arrays = {label: tensor.read() for label, tensor in found.items()}
        return {label: x[..., 0] for label, x in arrays.items()} if one else arrays

    def _save(self, row: Row, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        tensors: dict[str, LazyTensor] = {
            label: ArrayTensor(np.ascontiguousarray(x)) for label, x in parts.items()
        }
        return row.save(tensors)[row.name].read()


def modules(tree: Any, names: Names) -> list[Module]:
    """The modules of a checkpoint that adapters of a model's projections can be of."""
    folded, plain = in_body(tree), plain_paths(tree)
    linears = {}
    for path, x in paths(tree, is_leaf=lambda x: isinstance(x, Linear)).items():
        if isinstance(x, Linear):
            shape = x.weight.shape[int(folded(path)) :]
            linears |= {f"{each}.weight": (x.contract, shape) for each in plain(path)}
    rows = names.rows if isinstance(names, Relation) else _rows(linears, names)
    found = []
    for row in rows:
        inside = [linears.get(path) for path, _ in row.parts.values()]
        if row.stacked or not row.name.endswith(".weight") or None in inside:
            continue
        _, param = next(iter(row.parts.values()))
        ins = tuple(param.axes)[-linears[next(iter(row.parts.values()))[0]][0] :]
        module = Module(row.name.removesuffix(".weight"), row, ins)
        # One dimension of inputs, shared by all parts, and one of outputs.
        inputs = [module._is_input(dim) for dim in row.layout.dims]
        if sorted(inputs) == [False, True]:
            found.append(module)
    return found


def _rows(linears: Mapping[str, tuple[int, tuple[int, ...]]], names: Mapping[str, Any]) -> Any:
    """A row for each projection that has a tensor of its own."""
    rename, joined = renamer(names), parts_of_joins(names)
    for path, (contract, shape) in linears.items():
        if not path.removesuffix(".weight").endswith(tuple(f".{x}" for x in joined)):
            axes = {f"axis{i}": n for i, n in enumerate(shape)}
            outs, ins = list(axes)[:-contract], list(axes)[-contract:]
            layout = f"({' '.join(outs)}) ({' '.join(ins)})"
            yield Row(rename(path), parse(layout), {path: (path, Param(axes, layout))})


def parts_of_joins(names: Mapping[str, Any]) -> set[str]:
    return {label for x in names.values() if isinstance(x, Join) for label in x.parts}


def check_apart(found: Iterable[str], names: Names) -> None:
    """Adapters, by the path of their weight, can be saved.

    Raises:
        ConfigError: one is on a part of a fused projection, and only the table of names is known.
    """
    if isinstance(names, Relation):
        return
    joined = parts_of_joins(names)
    wrong = [p for p in found if p.removesuffix(".weight").endswith(tuple(f".{j}" for j in joined))]
    if wrong:
        raise ConfigError(
            f"An adapter on {wrong[0]} cannot be saved by the names of its family alone: in the "
            "file that projection is a part of a larger one, as are all of "
            f"{', '.join(sorted(joined))}. Use model.save_adapter."
        )


def whole_rows(tree: Any, names: Names) -> dict[str, Row]:
    """Heads and tables by the name of their weight in the checkpoint."""
    found = {}
    for path, x in paths(tree, is_leaf=lambda x: isinstance(x, Linear | Embedding)).items():
        if isinstance(x, Linear | Embedding):
            found[f"{path}.weight"] = x.weight.shape
    if isinstance(names, Relation):
        rows = (row for row in names.rows if len(row.parts) == 1 and not row.stacked)
        return {row.name: row for row in rows if next(iter(row.parts.values()))[0] in found}
    rename, out = renamer(names), {}
    for path, shape in found.items():
        axes = {f"axis{i}": n for i, n in enumerate(shape)}
        layout = f"axis0 ({' '.join(list(axes)[1:])})"
        out[rename(path)] = Row(rename(path), parse(layout), {path: (path, Param(axes, layout))})
    return out
