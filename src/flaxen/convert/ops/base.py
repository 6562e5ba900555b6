"""What an operation on the tensors of a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import CheckpointError

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
        """The operation that undoes this one.

        Raises:
            CheckpointError: there is none.
        """
        raise CheckpointError(
            f"{type(self).__name__} has no `reverse_op`, so what it made cannot be saved. Give it "
            "one: the operation that undoes it."
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def _undefined(self, expected: str, found: Sequence[str]) -> CheckpointError:
        return CheckpointError(
            f"Undefined Operation encountered! {type(self).__name__} takes {expected}, "
            f"but found {list(found)}."
        )

    def _only(self, input_dict: Tensors) -> LazyTensor:
        """The one tensor under the one pattern."""
        if len(input_dict) != 1:
            raise self._undefined("the tensor of one source pattern", list(input_dict))
        return self._single(*next(iter(input_dict.items())))

    def _single(self, pattern: str, value: LazyTensor | list[LazyTensor]) -> LazyTensor:
        """The one tensor under a pattern, alone or in a list."""
        tensors = as_list(value)
        if len(tensors) != 1:
            raise CheckpointError(
                f"{type(self).__name__} expects a single tensor per key. "
                f"Found {len(tensors)} under {pattern!r}."
            )
        return tensors[0]

    def _axis(self, tensor: LazyTensor, dim: int, ndim: int | None = None) -> int:
        """The axis that `dim` names, counted from the front."""
        ndim = tensor.ndim if ndim is None else ndim
        if not -ndim <= dim < ndim:
            raise CheckpointError(
                f"{type(self).__name__} works on dimension {dim}, "
                f"but found a tensor of shape {tensor.shape}."
            )
        return dim % ndim


def as_list(value: LazyTensor | list[LazyTensor]) -> list[LazyTensor]:
    return value if isinstance(value, list) else [value]


def key_of_one(source_patterns: Sequence[str], target_patterns: Sequence[str]) -> str:
    """Where a changed tensor goes: under the target, or where it was if its targets come later."""
    return (target_patterns if len(target_patterns) == 1 else source_patterns)[0]
