"""The rows of query and key projections in the order that rotary embeddings want."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.ops.axes import sort_pairs
from flaxen.convert.ops.base import ConversionOps, Tensors
from flaxen.convert.ops.config import setting

_KEY = re.compile(r"(?<![a-z])(?:w?k|keys?)(?![a-z])", re.IGNORECASE)


class PermuteForRope(ConversionOps):
    """Rows for rotating halves out of rows for rotating neighbouring pairs.

    The rows of a weight `[heads * head_dim, in]` or a bias `[heads * head_dim]` are sorted inside
    each head: all first elements of the pairs, then all second ones. Tensors of more dimensions
    stay as they are. inverse: halves to pairs.

    subconfig_key: the part of the configuration with the head counts, if it has it.
    permute_layer_names: only tensors whose source pattern contains one of these are touched.

    A tensor with `num_key_value_heads * head_dim` rows is a grouped key and has so many heads;
    where the configuration does not tell `head_dim`, one named as a key (`k_proj`, `key`) has.
    Transformers counts `num_attention_heads` for keys too, which mixes the rows of grouped ones;
    where the two counts are equal the results are.
    """

    def __init__(
        self,
        subconfig_key: str | None = None,
        permute_layer_names: list[str] | None = None,
        inverse: bool = False,
    ):
        self.subconfig_key = subconfig_key
        self.permute_layer_names, self.inverse = permute_layer_names, inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str = "",
        config: Any = None,
        **kwargs: Any,
    ) -> Tensors:
        if len(source_patterns) > 1 and len(target_patterns) > 1:
            raise self._undefined("one source or one target pattern", target_patterns)
        one = len(source_patterns) == len(target_patterns) == len(input_dict) == 1
        names = self.permute_layer_names
        out: Tensors = {}
        for pattern, value in input_dict.items():
            if names is None or any(name in pattern for name in names):
                name = f"{pattern} {full_layer_name}" if one else pattern
                value = self._permuted(self._single(pattern, value), name, config)
            out[target_patterns[0] if one else pattern] = value
        return out

    def _permuted(self, tensor: LazyTensor, name: str, config: Any) -> LazyTensor:
        if tensor.ndim not in (1, 2):
            return tensor
        config = setting(config, self.subconfig_key, config) if self.subconfig_key else config
        return sort_pairs(tensor, 0, head_count(tensor.shape[0], name, config), self.inverse)

    @property
    def reverse_op(self) -> PermuteForRope:
        return PermuteForRope(self.subconfig_key, self.permute_layer_names, not self.inverse)


def head_count(rows: int, name: str, config: Any) -> int:
    """How many heads a query or key projection with so many rows has."""
    heads = setting(config, "num_attention_heads", 1)
    grouped = setting(config, "num_key_value_heads", heads)
    head_dim = setting(config, "head_dim", setting(config, "hidden_size", 0) // heads)
    if rows == heads * head_dim:
        return heads
    if rows == grouped * head_dim or _KEY.search(name):
        return grouped
    return heads
