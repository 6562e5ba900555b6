"""Rotary position embeddings: which rotation a model makes, and its tables of cos and sin.

Frequencies and angles are float32 whatever the model's dtype; the rotated result is cast once.
Angles are computed for the positions that are asked, never looked up, so no length is too long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import ConfigError, InputError
from flaxen.layers.rope_axes import by_row_and_column, in_sections, in_turns
from flaxen.layers.rope_fields import layer_fields, read_fields
from flaxen.layers.rope_styles import rotate
from flaxen.layers.rope_types import ROPE_TYPES, Frequencies

__all__ = ["ROPE_TYPES", "Rope", "layer_rope", "rope", "rotate"]


AXIAL = ("axial", "axial_in_turns")
"""Types of pictures: a row and a column."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which rotation: `dim` channels of each head turn; `parameters` are Hugging Face's
    `rope_parameters` as sorted pairs.

    `interleaved` pairs channels (0, 1), (2, 3)...; otherwise (i, i + dim / 2).
    """

    dim: int
    max_positions: int
    parameters: tuple[tuple[str, Any], ...]
    interleaved: bool = False

    def __getitem__(self, key: str) -> Any:
        return dict(self.parameters)[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = dict(self.parameters).get(key)
        return default if value is None else value

    @property
    def kind(self) -> str:
        return self.get("rope_type", "default")

    @property
    def axes(self) -> int:
        """How many positions a token has: time, row and column with sections; row and column if
        axial.
        """
        return 2 if self.kind in AXIAL else 3 if self.get("mrope_section") else 1

    @property
    def switch(self) -> int | None:
        """The length past which other frequencies hold for every position, earlier ones too."""
        return self["original_max_position_embeddings"] if self.kind == "longrope" else None

    def frequencies(self, length: jax.Array | int | None = None) -> Frequencies:
        """Inverse frequencies and the factor on cos and sin, for texts of `length` tokens; None
        is the state before any text.
        """
        return ROPE_TYPES[self.kind](self, length)

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 (B, T, dim / 2), for integer positions (B, T), or (axes, B, T).

        Types that depend on the length take the largest position + 1 as the length.

        Raises:
            InputError: for positions of another number of axes.
        """
        return self.tables_with(*self.frequencies(positions.max() + 1), positions)

    def tables_with(
        self, inv: jax.Array, scale: float, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`tables` of given frequencies."""
        angle = self._along_axes(positions)[..., None].astype(jnp.float32) * inv
        if self.kind == "axial":
            angle = by_row_and_column(angle)
        elif self.kind == "axial_in_turns":
            columns = angle.shape[-1] // 2  # of an odd number of pairs, rows turn one more
            angle = in_sections(angle, (angle.shape[-1] - columns, columns))
        elif self.axes == 3:
            mix = in_turns if self.get("mrope_interleaved") else in_sections
            angle = mix(angle, self["mrope_section"])
        return jnp.cos(angle) * scale, jnp.sin(angle) * scale

    def _along_axes(self, positions: jax.Array) -> jax.Array:
        if self.axes == 1 and positions.ndim == 2:
            return positions
        if self.axes == 3 and positions.ndim == 2:  # text: the same on every axis
            return jnp.broadcast_to(positions, (3, *positions.shape))
        if self.axes > 1 and positions.ndim == 3 and len(positions) == self.axes:
            return positions
        also = f"({self.axes}, batch, length)" if self.axes > 1 else "(batch, length)"
        raise InputError(
            f"positions have shape {positions.shape}; this rope of type {self.kind!r} has "
            f"{self.axes} for each token and expects {also}."
        )

    def base(self, dim: int | None = None) -> np.ndarray:
        """theta ** (-2i / dim), float32."""
        exponent = np.arange(0, dim or self.dim, 2, dtype=np.float32) / np.float32(dim or self.dim)
        return (1.0 / np.float32(self["rope_theta"]) ** exponent).astype(np.float32)


def rope(parameters: Any, head_dim: int, max_positions: int, **kw: Any) -> Rope:
    """A `Rope` from a config's `rope_parameters` (one type's, not nested).

    Raises:
        ConfigError: for a type this library does not have, or fields that are missing, that nothing
        reads, or whose values make no sense.
    """
    dim, fields = read_fields(parameters, head_dim)
    made = Rope(dim, max_positions, tuple(sorted(fields.items())), **kw)
    try:
        inv, scale = made.frequencies()
        finite = np.isfinite(inv).all() and np.isfinite(scale)
    except (ArithmeticError, ValueError):
        finite = False
    if not finite:
        raise ConfigError(f"The frequencies of {dict(parameters)} are no finite numbers.")
    return made


def layer_rope(
    parameters: Any, layer_type: str, head_dim: int, max_positions: int, **kw: Any
) -> Rope | None:
    """The `Rope` of one layer type, from `rope_parameters` that are nested by layer type or the
    same for all; None where the config says null: such layers do not rotate.

    Raises:
        ConfigError: as `rope`, or for a layer type that nested parameters leave out.
    """
    fields = layer_fields(parameters, layer_type)
    return None if fields is None else rope(fields, head_dim, max_positions, **kw)
