"""How a cache stores numbers: each vector by itself, so that nothing is ever stored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from flaxen.core.registry import Registry
from flaxen.core.tree import module, static


class Codec(Protocol):
    """Between vectors (..., H) and what is stored of them: a tree of arrays (..., anything)."""

    @property
    def dtype(self) -> Any: ...

    def encode(self, x: jax.Array) -> Any: ...

    def decode(self, stored: Any, dtype: Any) -> jax.Array: ...


@module
class Codes:
    """Vectors as small numbers: codes (..., n), and the largest magnitude of each, (..., 1), which
    is exact in the vector's own dtype. width: channels of a vector.
    """

    codes: jax.Array
    largest: jax.Array
    width: static[int]


@dataclasses.dataclass(frozen=True)
class AsIs:
    """Plain numbers of one dtype."""

    dtype: Any

    def encode(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype)

    def decode(self, stored: jax.Array, dtype: Any) -> jax.Array:
        return stored.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Int8:
    """One byte a channel: off by at most absmax / 254."""

    dtype: Any

    def encode(self, x: jax.Array) -> Codes:
        scaled, largest = _scaled(x, self.dtype, 127)
        return Codes(codes=jnp.round(scaled).astype(jnp.int8), largest=largest, width=x.shape[-1])

    def decode(self, stored: Codes, dtype: Any) -> jax.Array:
        return _unscaled(stored.codes, stored.largest, 127, dtype)


@dataclasses.dataclass(frozen=True)
class Int4:
    """Two channels a byte, the first half of a vector in the low bits: off by absmax / 14 at
    most.
    """

    dtype: Any

    def encode(self, x: jax.Array) -> Codes:
        scaled, largest = _scaled(x, self.dtype, 7)
        codes = (jnp.round(scaled) + 8).astype(jnp.uint8)
        low, high = jnp.split(_even(codes), 2, axis=-1)
        return Codes(codes=low | high << 4, largest=largest, width=x.shape[-1])

    def decode(self, stored: Codes, dtype: Any) -> jax.Array:
        codes = jnp.concatenate([stored.codes & 15, stored.codes >> 4], -1)[..., : stored.width]
        return _unscaled(codes.astype(jnp.int8) - 8, stored.largest, 7, dtype)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """float8_e4m3fn, stretched over each vector: off by at most 1/16 of a channel's own value, or
    absmax / 2**18 where that is larger.
    """

    dtype: Any

    def encode(self, x: jax.Array) -> Codes:
        scaled, largest = _scaled(x, self.dtype, 448)
        codes = scaled.astype(jnp.float8_e4m3fn)
        return Codes(codes=codes, largest=largest, width=x.shape[-1])

    def decode(self, stored: Codes, dtype: Any) -> jax.Array:
        return _unscaled(stored.codes, stored.largest, 448, dtype)


CODECS: Registry[Callable[[Any], Codec]] = Registry("cache codec")
"""From a dtype to a codec, by name."""
CODECS.register("int8", Int8)
CODECS.register("int4", Int4)
CODECS.register("fp8", Fp8)


def codec_for(name: str | None, dtype: Any) -> Codec:
    """A codec for vectors of a dtype; None stores them as they are."""
    return (AsIs if name is None else CODECS[name])(jnp.dtype(dtype))


def width(stored: Any) -> int:
    """Channels of the vectors that are stored."""
    return stored.width if isinstance(stored, Codes) else stored.shape[-1]


def _scaled(x: jax.Array, dtype: Any, top: int) -> tuple[jax.Array, jax.Array]:
    """The vectors in float32, their largest channel being `top`, and what that was."""
    x = x.astype(dtype)
    largest = jnp.max(jnp.abs(x), -1, keepdims=True)
    divisor = jnp.where(largest > 0, largest, 1).astype(jnp.float32)
    return x.astype(jnp.float32) / divisor * top, largest


def _unscaled(codes: jax.Array, largest: jax.Array, top: int, dtype: Any) -> jax.Array:
    return (codes.astype(jnp.float32) * (largest.astype(jnp.float32) / top)).astype(dtype)


def _even(codes: jax.Array) -> jax.Array:
    return jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
