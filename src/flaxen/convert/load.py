"""Fit a checkpoint to a model: which tensor is which weight, and everything that does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxen.convert.lazy import LazyTensor, whole
from flaxen.convert.relation import Relation, Row
from flaxen.convert.report import Mismatch, Report
from flaxen.convert.transforms import Applied, WeightTransform, transformed
from flaxen.convert.views import CHUNK, slabs


class Match(NamedTuple):
    """Our weights by path, what did not fit, and what the names and layouts went through."""

    weights: dict[str, LazyTensor]
    report: Report
    applied: Applied
    partial: list[tuple[Row, dict[str, LazyTensor]]]
    """Rows some tensors of which are there, by name, and others are not or do not fit."""


def match(
    relation: Relation,
    checkpoint: Mapping[str, LazyTensor],
    transforms: Sequence[WeightTransform] = (),
    *,
    tied: Mapping[str, str] | None = None,
    config: Any = None,
    base_prefix: str = "model",
    buffers: str = r"rotary_emb\.inv_freq|position_ids",
    spare: str = r"(?!)",
    optional: str = r"(?!)",
) -> Match:
    """Which tensor is which weight; a weight that does not fit is left out.

    transforms: what the names and layouts of the checkpoint go through first.
    tied: name of a tensor that the config says is shared -> the name it is kept under. Either may
    be in the file, or both if they are equal bit for bit.
    base_prefix: what a model with a head has before the names of the model without one; a
    checkpoint of either loads into the other.
    buffers: ends of names of what old checkpoints hold and every model computes.
    spare: how names begin of what belongs to heads that the model does not have.
    optional: what the checkpoint may lack, by name.
    """
    tied = tied or {}
    expected, report = relation.shapes(), Report()
    wanted = {**expected, **{target: expected[source] for target, source in tied.items()}}
    view = transformed(checkpoint, transforms, wanted, config=config, base_prefix=base_prefix)
    ignored = re.compile(rf"(^|\.)({buffers})$")
    report.unexpected = [name for name in view.unexpected if not ignored.search(name)]
    report.left_out = [name for name in report.unexpected if re.match(spare, name)]
    report.unexpected = [name for name in report.unexpected if name not in report.left_out]
    report.errors = dict(view.errors)
    found, applied = dict(view), view.applied
    for target, source in tied.items():
        head = found.pop(target, None)
        if head is not None and source in found and not equal(head, found[source]):
            report.untied.append((target, source))
            continue
        if head is not None and source not in found:
            found[source] = head
            if target in applied.names:
                applied = applied.instead(target, source)
            else:
                report.doubled.append(target)
        elif head is not None:
            report.doubled.append(target)
        report.tied[target] = source
    report.missing = [name for name in expected if name not in found]
    report.mismatched = [
        Mismatch(name, found[name].shape, shape)
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    bad = {*report.missing, *(m.name for m in report.mismatched)}
    report.absent = [name for name in report.missing if re.fullmatch(optional, name)]
    report.missing = [name for name in report.missing if name not in report.absent]
    weights, partial = {}, []
    for row in relation.rows:
        fits = {name: found[name] for name in row.names if name not in bad}
        if len(fits) == len(row.names):
            weights |= load_row(row, fits)
        elif fits:
            partial.append((row, fits))
    return Match(weights, report, applied, partial)


def load_row(row: Row, found: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Our weights in one row; stacked tensors that differ in dtype, in the one that holds all."""
    sources = {name: found[name] for name in row.names}
    wide = np.result_type(*{t.dtype for t in sources.values()})
    return row.load({name: t.astype(wide) for name, t in sources.items()})


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Whether two tensors are the same bit for bit; a chunk of each is in memory at a time."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    parts = (box for box, _ in slabs(whole(a.shape), a.dtype.itemsize, CHUNK))
    return all(_same_bytes(a.read(box), b.read(box)) for box in parts)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
