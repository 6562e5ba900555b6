"""Cut one tensor into several along an axis, and join several into one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flaxen.convert.lazy import LazyTensor, concat
from flaxen.convert.ops.base import ConversionOps, Tensors, as_list
from flaxen.convert.ops.config import setting, text_config
from flaxen.core.errors import CheckpointError, ConfigError

Shapes = Mapping[str, tuple[int, ...]]


class Chunk(ConversionOps):
    """Cut a tensor along `dim` into one piece for each target pattern.

    The pieces are as large as the model's tensors where `shapes` knows all of them and they fill
    the axis (grouped queries, keys and values), else equal, the last one smaller where the size
    does not divide. num_shards_attribute: the setting with the number of pieces; they then go to
    the one target with its `*` counted up.
    """

    def __init__(self, dim: int = 0, num_shards_attribute: str | None = None):
        self.dim, self.num_shards_attribute = dim, num_shards_attribute

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str = "",
        config: Any = None,
        shapes: Shapes | None = None,
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        dim = self._axis(tensor, self.dim)
        targets = self._targets(target_patterns, config)
        found = target_shapes(target_patterns, full_layer_name, shapes or {})
        sizes = [s[dim] for s in found if s is not None and len(s) == tensor.ndim]
        if len(sizes) != len(targets) or sum(sizes) != tensor.shape[dim]:
            sizes = equal_sizes(tensor.shape[dim], len(targets))
        return dict(zip(targets, cut(tensor, dim, sizes), strict=True))

    def _targets(self, target_patterns: Sequence[str], config: Any) -> list[str]:
        if self.num_shards_attribute is None:
            return list(target_patterns)
        if len(target_patterns) != 1:
            raise self._undefined("one target pattern to count up", target_patterns)
        count = setting(text_config(config), self.num_shards_attribute)
        if count is None:
            raise ConfigError(
                f"Chunk takes its number of pieces from {self.num_shards_attribute!r}, "
                "which the configuration does not have."
            )
        return numbered(target_patterns[0], count)

    @property
    def reverse_op(self) -> Concatenate:
        return Concatenate(self.dim, self.num_shards_attribute)


class Split(ConversionOps):
    """Cut a tensor along `dim` into pieces as large as the model's tensors, equal or not."""

    def __init__(self, dim: int = 0):
        self.dim = dim

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str = "",
        shapes: Shapes | None = None,
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        dim = self._axis(tensor, self.dim)
        found = target_shapes(target_patterns, full_layer_name, shapes or {})
        sizes = [shape[self.dim] for shape in found if shape is not None]
        if len(sizes) != len(target_patterns) or sum(sizes) != tensor.shape[dim]:
            targets = dict(zip(target_patterns, found, strict=True))
            raise CheckpointError(
                f"Split cuts a tensor of shape {tensor.shape} along dimension {self.dim} to the "
                f"sizes of the model's tensors, but those are {targets} (beside "
                f"{full_layer_name!r})."
            )
        return dict(zip(target_patterns, cut(tensor, dim, sizes), strict=True))

    @property
    def reverse_op(self) -> Concatenate:
        return Concatenate(self.dim)


class Concatenate(ConversionOps):
    """Join all tensors along `dim`, in the order of the source patterns.

    A source pattern that nothing matched is left out. num_shards_attribute: how the inverse finds
    the number of pieces.
    """

    def __init__(self, dim: int = 0, num_shards_attribute: str | None = None):
        self.dim, self.num_shards_attribute = dim, num_shards_attribute

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        if len(target_patterns) != 1:
            raise self._undefined("one target pattern", target_patterns)
        parts = [t for p in source_patterns if p in input_dict for t in as_list(input_dict[p])]
        if not parts:
            raise self._undefined(f"the tensors of {list(source_patterns)}", list(input_dict))
        return {target_patterns[0]: concat(parts, self._axis(parts[0], self.dim))}

    @property
    def reverse_op(self) -> Chunk:
        return Chunk(self.dim, self.num_shards_attribute)


def target_shapes(
    target_patterns: Sequence[str], full_layer_name: str, shapes: Shapes
) -> list[tuple[int, ...] | None]:
    """The shape of the model's tensor for each target, found by its first target's full name."""
    first = re.escape(target_patterns[0])
    places = [match.span() for match in re.finditer(first, full_layer_name)]

    def names(target: str) -> Iterator[str]:
        yield from (full_layer_name[:i] + target + full_layer_name[j:] for i, j in places)

    return [
        next((shapes[name] for name in names(target) if name in shapes), None)
        for target in target_patterns
    ]


def equal_sizes(size: int, count: int) -> list[int]:
    """Sizes of `count` pieces of an axis: all alike, but for a smaller last one.

    Raises:
        CheckpointError: the pieces would not all have something.
    """
    each = -(-size // max(count, 1))
    sizes = [min(each, size - start) for start in range(0, size, max(each, 1))]
    if len(sizes) != count:
        raise CheckpointError(f"Cannot cut an axis of size {size} into {count} pieces.")
    return sizes


def cut(tensor: LazyTensor, dim: int, sizes: Sequence[int]) -> list[LazyTensor]:
    """Pieces one after another along an axis."""
    stops = list(accumulate(sizes))
    rest = [slice(None)] * tensor.ndim
    return [
        tensor.crop([*rest[:dim], slice(stop - size, stop), *rest[dim + 1 :]])
        for size, stop in zip(sizes, stops, strict=True)
    ]


def numbered(pattern: str, count: int) -> list[str]:
    """A pattern with its `*` as 0, 1, ..., one name for each of several tensors.

    Raises:
        CheckpointError: without a `*` they would all have the same name.
    """
    if "*" not in pattern and count > 1:
        raise CheckpointError(f"{count} tensors cannot all be named {pattern!r}: it has no '*'.")
    return [pattern.replace("*", str(i)) for i in range(count)]
