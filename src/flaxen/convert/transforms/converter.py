"""Transforms that rename and pass the tensors through operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from flaxen.convert.ops.base import ConversionOps
from flaxen.convert.transforms.transform import WeightTransform
from flaxen.core.errors import ConfigError


class WeightConverter(WeightTransform):
    """Collects the tensors of its sources and makes those of its targets, operation by operation.

    A key is renamed to the first target; what the operations give back says the rest.

    Raises:
        ConfigError: no operation, or several sources and several targets with operations of which
            none can take that.
    """

    def __init__(
        self,
        source_patterns: str | Sequence[str],
        target_patterns: str | Sequence[str],
        operations: Sequence[ConversionOps],
    ):
        super().__init__(source_patterns, target_patterns)
        self.operations = list(operations or ())
        if not self.operations:
            raise ConfigError("WeightConverter requires at least one operation.")
        for op in self.operations:
            if not isinstance(op, ConversionOps):
                raise ConfigError(f"{op!r} is no operation: pass instances of ConversionOps.")
        many = len(self.source_patterns) > 1 and len(self.target_patterns) > 1
        if many and not any(op.supports_many_to_many for op in self.operations):
            raise ConfigError(
                f"source keys={self.source_patterns}, target_patterns={self.target_patterns} but "
                "you can only have one to many, one to one or many to one."
            )

    def _again(self) -> Self:
        return type(self)(*self._given, self.operations)

    def _reversed(self) -> WeightConverter:
        sources, targets = self._given
        return type(self)(targets, sources, [op.reverse_op for op in reversed(self.operations)])
