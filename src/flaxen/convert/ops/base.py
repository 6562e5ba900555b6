"""What an operation on the tensors of a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor

Tensors = dict[str, LazyTensor | list[LazyTensor]]
"""Pattern -> its tensor, or the tensors of all keys that it matched in natural order."""


class ConversionOps:
    """One step between the tensors of a checkpoint and those of a model; subclass it for your own.

    An operation maps lazy tensors to lazy tensors: it never reads, so whoever wants a box of the
    result reads just the boxes of the sources behind it. `reverse_op` undoes it exactly.
    """

    supports_many_to_many = False
    """Whether a converter may hold this operation with several sources and several targets."""

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str = "",
        config: Any = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        **kwargs: Any,
    ) -> Tensors:
        """The tensors of the next step, by pattern.

        full_layer_name: the key under its first target pattern. shapes: those of the model's
        tensors by name, for operations that cut to measure.

        Raises:
            ValueError: the tensors are not what this operation takes.
        """
        raise NotImplementedError

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that undoes this one."""
        raise NotImplementedError
