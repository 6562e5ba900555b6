"""Matrices as integers of 8 or 4 bits: the rule, in NumPy, and how the integers are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flaxen.convert.lazy import Box
from flaxen.convert.schemes.base import Parts, aligned, blocks
from flaxen.core.errors import CheckpointError, ConfigError

GROUPS = (128, 64, 32)
"""Inputs that share a scale at 4 bits, the usual number first."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """code = round(w / scale), half to even; w is taken to be code * scale.

    bits: 8 or 4. group: neighbouring inputs of one output that share a scale; -1 is all of them;
    None is -1 at 8 bits, and at 4 bits the first of 128, 64 and 32 that divides the inputs, or -1.

    A scale is float16: the group's largest magnitude / (2^(bits - 1) - 1/2), rounded up, so codes
    fill -2^(bits - 1) ... 2^(bits - 1) - 1 and |w - code * scale| <= scale / 2. A group of zeros
    has the scale 1.

    Stored as `codes` (..., out, in) int8, or at 4 bits (..., out / 2, in) uint8 with an even
    output in the low half of a byte and the odd one after it in the high half; and `scales`
    (..., out, groups) float16.
    """

    bits: int = 8
    group: int | None = None
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "codes": ("out", "in"),
        "scales": ("out", "in"),
    }
    groups: ClassVar[tuple[int, ...]] = GROUPS
    """Inputs that share a scale at 4 bits if nothing else is asked."""

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ConfigError(f"bits is {self.bits!r}; expected 8 or 4.")
        if self.group is not None and self.group != -1 and self.group < 1:
            raise ConfigError(f"group is {self.group}; expected a number of inputs, or -1 for all.")

    @property
    def outputs(self) -> int:
        """Outputs in a byte of codes."""
        return 8 // self.bits

    @property
    def top(self) -> float:
        """The largest magnitude of a group, in scales."""
        return 2 ** (self.bits - 1) - 0.5

    @property
    def code_dtype(self) -> np.dtype:
        return np.dtype(np.int8 if self.bits == 8 else np.uint8)

    def fitted(self, outs: int, ins: int) -> Rounding:
        """The rounding of a matrix, its group a number that divides the inputs.

        Raises:
            ConfigError: a group that does not, or a number of outputs that fills no bytes.
        """
        group = self.group
        if group is None:
            group = next((g for g in self.groups if self.bits == 4 and ins % g == 0), ins)
        group = ins if group == -1 else group
        if ins % group:
            raise ConfigError(f"{ins} inputs do not divide into groups of {group}.")
        if outs % self.outputs:
            raise ConfigError(f"{outs} outputs are odd, and at 4 bits two share a byte.")
        return dataclasses.replace(self, group=group)

    def scales(self, values: np.ndarray) -> np.ndarray:
        """(..., out, in) float32, whole groups -> (..., out, groups) float16.

        Raises:
            CheckpointError: values that are not finite, or too large for a scale in float16.
        """
        groups = values.reshape(*values.shape[:-1], -1, self._size(values.shape[-1]))
        exact = np.abs(groups).max(-1).astype(np.float64) / self.top
        with np.errstate(over="ignore"):
            scales = exact.astype(np.float16)
            low = scales.astype(np.float64) < exact
            scales = np.where(low, np.nextafter(scales, np.float16(np.inf)), scales)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"A weight holds {np.abs(values).max():g}; quantised can only be finite numbers "
                f"below {65504 * 2 ** (self.bits - 1):,}. Leave it as it is by a rule: None."
            )
        return np.where(scales > 0, scales, np.float16(1))

    def rounded(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Codes (..., out, in) int8 of float32 values, given their scales."""
        half = 2 ** (self.bits - 1)
        groups = values.reshape(*scales.shape, -1)
        # In float64 a quotient never rounds to a tie that it is not.
        codes = np.divide(groups, scales[..., None], dtype=np.float64)
        np.clip(np.rint(codes, out=codes), -half, half - 1, out=codes)
        return codes.astype(np.int8).reshape(values.shape)

    def packed(self, codes: np.ndarray) -> np.ndarray:
        """Codes as they are stored."""
        if self.bits == 8:
            return codes
        raw = codes.view(np.uint8)
        return raw[..., 0::2, :] & 15 | raw[..., 1::2, :] << 4

    def codes(self, stored: Any, xp: Any = np) -> Any:
        """The inverse of `packed`."""
        if self.bits == 8:
            return stored
        pairs = xp.stack(nibbles(stored, xp), -2)
        return pairs.reshape(*stored.shape[:-2], -1, stored.shape[-1])

    def levels(self, codes: Any, xp: Any = np) -> Any:
        """What codes are in scales."""
        return codes

    def cover(self, box: Box) -> Box:
        return (*box[:-2], aligned(box[-2], self.outputs), aligned(box[-1], self.group or 1))

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        *outer, outs, ins = box
        return {
            "codes": (*outer, blocks(outs, self.outputs), ins),
            "scales": (*outer, outs, blocks(ins, self.group or 1)),
        }

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        codes, scales = self.codes(parts["codes"], xp), parts["scales"]
        groups = self.levels(codes, xp).reshape(*scales.shape, -1).astype(xp.float32)
        return (groups * scales.astype(xp.float32)[..., None]).reshape(codes.shape)

    def _size(self, ins: int) -> int:
        return min(self.group or ins, ins)


def nibbles(stored: Any, xp: Any = np) -> tuple[Any, Any]:
    """The low and the high halves of bytes, as signed numbers."""
    raw = stored.view(xp.int8)
    return (raw << 4) >> 4, raw >> 4
