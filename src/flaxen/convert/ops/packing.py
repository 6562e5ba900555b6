"""Tensors that a checkpoint holds with rows of nothing, or rows of two kinds in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxen.convert.lazy import concat
from flaxen.convert.ops.base import ConversionOps, Tensors
from flaxen.convert.ops.chunk import cut
from flaxen.convert.ops.config import setting, text_config
from flaxen.convert.views import Padded
from flaxen.core.errors import CheckpointError, ConfigError


class UnpadVocab(ConversionOps):
    """Cut the rows after `unpadded_vocab_size`; the inverse adds zeros up to `vocab_size`.

    Going there and back restores a padding of zeros; other values in it are lost.
    """

    def __init__(self, inverse: bool = False):
        self.inverse = inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        config: Any = None,
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        self._axis(tensor, 0)
        name = "vocab_size" if self.inverse else "unpadded_vocab_size"
        size = setting(text_config(config), name)
        if size is None:
            raise ConfigError(f"UnpadVocab needs {name!r}, which the configuration does not have.")
        if not self.inverse:
            return {
                target_patterns[0]: tensor.crop(
                    [slice(0, size), *[slice(None)] * (tensor.ndim - 1)]
                )
            }
        if tensor.shape[0] > size:
            raise CheckpointError(
                f"A tensor of shape {tensor.shape} has more rows than the vocabulary of {size}."
            )
        return {target_patterns[0]: Padded(tensor, (size, *tensor.shape[1:]))}

    @property
    def reverse_op(self) -> UnpadVocab:
        return UnpadVocab(not self.inverse)


class MergeMessageQueries(ConversionOps):
    """Queries `[2 * layers, dim]` and key-value queries alike as `[layers, 4, dim]`.

    The four of a layer are its first query, both of its key-value queries, its second query.
    """

    def __init__(self, inverse: bool = False):
        self.inverse = inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        return (
            self._parted(input_dict, target_patterns)
            if self.inverse
            else self._merged(input_dict, source_patterns, target_patterns)
        )

    def _merged(
        self, input_dict: Tensors, source_patterns: Sequence[str], target_patterns: Sequence[str]
    ) -> Tensors:
        if len(source_patterns) != 2 or sorted(input_dict) != sorted(source_patterns):
            raise self._undefined("the tensors of two source patterns", list(input_dict))
        queries, others = (self._single(p, input_dict[p]) for p in source_patterns)
        if queries.ndim != 2 or queries.shape != others.shape or queries.shape[0] % 2:
            raise CheckpointError(
                "MergeMessageQueries takes two tensors of one shape [2 * layers, dim], "
                f"but found {queries.shape} and {others.shape}."
            )
        pairs = (queries.shape[0] // 2, 2, queries.shape[1])
        first, last = cut(queries.reshape(pairs), 1, [1, 1])
        return {target_patterns[0]: concat([first, others.reshape(pairs), last], 1)}

    def _parted(self, input_dict: Tensors, target_patterns: Sequence[str]) -> Tensors:
        tensor = self._only(input_dict)
        if len(target_patterns) != 2:
            raise self._undefined("two target patterns", target_patterns)
        if tensor.ndim != 3 or tensor.shape[1] != 4:
            raise CheckpointError(
                f"MergeMessageQueries takes [layers, 4, dim] apart, but found {tensor.shape}."
            )
        first, others, last = cut(tensor, 1, [1, 2, 1])
        shape = (2 * tensor.shape[0], tensor.shape[2])
        parts = (concat([first, last], 1).reshape(shape), others.reshape(shape))
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> MergeMessageQueries:
        return MergeMessageQueries(not self.inverse)
