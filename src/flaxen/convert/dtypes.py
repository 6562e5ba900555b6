"""Which dtype each weight gets: one for all, or by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.convert.lazy import is_float
from flaxen.core.errors import ConfigError, did_you_mean

FLOATS: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}


SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Other names that people and tools use."""


@dataclasses.dataclass(frozen=True)
class DtypePlan:
    """Rules in order: the first whose pattern is found in a tensor's name says what it becomes."""

    rules: tuple[tuple[str, np.dtype], ...] = ()

    def of(self, name: str, stored: np.dtype) -> np.dtype:
        """The dtype of one tensor; integers, booleans and what no rule names stay as stored."""
        if not is_float(stored):
            return stored
        return next((kind for pattern, kind in self.rules if _found(pattern, name)), stored)

    def asks(self, name: str) -> bool:
        """Whether a rule is about this tensor rather than about all that no other is about."""
        return next((p != "*" for p, _ in self.rules if _found(p, name)), False)

    def check(self, names: Iterable[str]) -> None:
        """
        Raises:
            ConfigError: a pattern that is found in none of the names.
        """
        names = list(names)
        for pattern, _ in self.rules:
            if not any(_found(pattern, name) for name in names):
                raise ConfigError(
                    f"dtype: no tensor has {pattern!r} in its name; names are such as {names[0]!r}."
                )

    @property
    def main(self) -> np.dtype | None:
        """What the rest of a model becomes, for its config to say."""
        return (
            self.of("", np.dtype(np.float32)) if self.rules and self.rules[-1][0] == "*" else None
        )


def _found(pattern: str, name: str) -> bool:
    return re.search(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def dtype_plan(dtype: Any) -> DtypePlan:
    """A plan from a dtype, from None or "auto" (all as stored), or from {pattern: dtype}.

    A pattern is found anywhere in a tensor's name in the file; `*` is any text, and the first
    pattern that is found counts: `{"router": "float32", "*": "bfloat16"}`.

    Raises:
        ConfigError: a dtype that is no float, or that jax is not set up for.
    """
    if not isinstance(dtype, Mapping):
        kind = float_dtype(dtype)
        return DtypePlan() if kind is None else DtypePlan((("*", kind),))
    kinds = {str(pattern): float_dtype(kind) for pattern, kind in dtype.items()}
    return DtypePlan(tuple((pattern, kind) for pattern, kind in kinds.items() if kind is not None))


def float_dtype(dtype: Any) -> np.dtype | None:
    """The dtype that a name asks for; None (or "auto") means as stored."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    try:
        name = SHORT.get(dtype, dtype) if isinstance(dtype, str) else np.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in FLOATS:
        raise ConfigError(f"Unknown dtype {name!r}.{did_you_mean(name, FLOATS)}")
    if name == "float64":
        import jax

        if not jax.config.read("jax_enable_x64"):
            raise ConfigError(
                "dtype 'float64' needs jax.config.update('jax_enable_x64', True) first."
            )
    return FLOATS[name]
