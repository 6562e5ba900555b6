"""One converter at work on the tensors of one entry, forwards and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.ops.base import ConversionOps, Tensors, as_list
from flaxen.convert.transforms.converter import WeightConverter
from flaxen.convert.transforms.naming import Entry, counted
from flaxen.core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class Conversion(NamedTuple):
    """What one converter did: enough to undo it exactly."""

    converter: WeightConverter
    group: str | None
    """What `\\1` in its patterns stands for."""
    sources: dict[int, tuple[str, ...]]
    """Index of the source pattern -> the keys in the checkpoint."""
    targets: dict[int, tuple[str, ...]]
    """Index of the target pattern -> the names in the model."""
    inputs: tuple[dict[int, tuple[int, ...]], ...]
    """For each operation, the shape that it found under each source pattern."""

    def every_key(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]

    def every_target(self) -> list[str]:
        return [name for names in self.targets.values() for name in names]


def convert(
    entry: Entry, tensors: Mapping[str, LazyTensor], config: Any, shapes: Shapes
) -> tuple[dict[str, LazyTensor], Conversion]:
    """The model's tensors by name, and the record of how they came about.

    Raises:
        CheckpointError: what an operation does not take, with its name and the tensors it found.
    """
    converter, targets = entry.converter, entry.targets
    sources = converter.source_patterns
    data: Tensors = {sources[i]: [tensors[k] for k in entry.keys[i]] for i in sorted(entry.keys)}
    found, inputs = len(entry.every_key()), []
    for op in converter.operations:
        inputs.append(_shapes(data, sources))
        data = _run(op, data, sources, targets, entry.full(targets[0]), config, shapes, found)
    parts = {key: _one(key, value) for key, value in data.items()}
    # An operation of a user's may give whole names.
    patterns = any(target in parts or counted(target) in parts for target in targets)
    named = {key: entry.full(key) if patterns else key for key in parts}
    record = Conversion(
        converter,
        entry.match.groups[0] if entry.match.groups else None,
        {i: tuple(keys) for i, keys in sorted(entry.keys.items())},
        _by_pattern(named, targets),
        tuple(inputs),
    )
    return {named[key]: tensor for key, tensor in parts.items()}, record


def undo(done: Conversion, tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """The tensors of the checkpoint by key, from those of the model."""
    back = done.converter.reverse_transform()
    assert isinstance(back, WeightConverter)
    sources = [_filled(p, done.group) for p in back.source_patterns]
    targets = {i: _filled(back.target_patterns[i], done.group) for i in done.sources}
    data: Tensors = {sources[i]: [tensors[n] for n in done.targets[i]] for i in done.targets}
    names = list(targets.values())
    for op, shapes in zip(back.operations, reversed(done.inputs), strict=True):
        known = {targets[i]: shape for i, shape in shapes.items()}
        data = _run(op, data, sources, names, names[0], config, known, len(data))
    keys = _by_pattern({key: key for key in data}, names)
    out = {}
    for place, i in enumerate(done.sources):
        if len(keys.get(place, ())) != len(done.sources[i]):
            raise CheckpointError(
                f"{done.converter} took {len(done.sources[i])} tensors for {names[place]!r}, but "
                f"its reversal gives {len(keys.get(place, ()))}."
            )
        for key, name in zip(keys[place], done.sources[i], strict=True):
            out[name] = _one(key, data[key])
    return out


def _run(
    op: ConversionOps,
    data: Tensors,
    sources: Sequence[str],
    targets: Sequence[str],
    name: str,
    config: Any,
    shapes: Shapes,
    count: int,
) -> Tensors:
    try:
        made = op.convert(
            data, sources, targets, full_layer_name=name, config=config, shapes=shapes
        )
        if not _are_tensors(made):
            raise TypeError(f"It gave {made!r:.80}, not a dict from pattern to lazy tensors.")
        return made
    # Anything at all: operations are written by users too.
    except Exception as error:
        raise CheckpointError(
            f"{op} on tensors destined for {name}. Ckpt contains: {count}. {error}"
        ) from error


def _are_tensors(made: Any) -> bool:
    values = made.values() if isinstance(made, Mapping) else [[made]]
    return all(isinstance(tensor, LazyTensor) for value in values for tensor in as_list(value))


def _one(key: str, value: LazyTensor | list[LazyTensor]) -> LazyTensor:
    tensors = as_list(value)
    if len(tensors) != 1:
        raise CheckpointError(f"The operations leave {len(tensors)} tensors for {key!r}, not one.")
    return tensors[0]


def _shapes(data: Tensors, sources: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Those of what is one tensor under a source pattern, or equal ones."""
    lists = {i: as_list(data[p]) for i, p in enumerate(sources) if p in data}
    return {i: tensors[0].shape for i, tensors in lists.items() if tensors}


def _by_pattern(names: Mapping[str, str], patterns: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """The names of the results that belong to each pattern; a glob counts up."""
    out = {}
    for i, pattern in enumerate(patterns):
        if pattern in names:
            out[i] = (names[pattern],)
        elif "*" in pattern:
            count = 0
            while pattern.replace("*", str(count)) in names:
                count += 1
            if count:
                out[i] = tuple(names[pattern.replace("*", str(n))] for n in range(count))
    return out


def _filled(pattern: str, group: str | None) -> str:
    return pattern if group is None else pattern.replace(r"\1", group)
