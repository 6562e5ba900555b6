"""Rotary position embeddings: frequencies by type, and the rotation.

Frequencies and angles are float32 whatever the model's dtype; the rotated result is cast once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import ConfigError
from flaxen.core.registry import Registry

Frequencies = tuple[Any, float]
"""Inverse frequencies (dim / 2,) in float32, and the factor on cos and sin."""

ROPE_TYPES: Registry[Callable[[Rope, jax.Array | None], Frequencies]] = Registry("rope_type")


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
    def switch(self) -> int | None:
        """The length past which other frequencies hold for every position, earlier ones too."""
        kind = self.get("rope_type", "default")
        return self["original_max_position_embeddings"] if kind == "longrope" else None

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 (B, T, dim / 2), for integer positions (B, T)."""
        inv, scale = ROPE_TYPES[self.get("rope_type", "default")](self, positions.max() + 1)
        angle = positions.astype(jnp.float32)[..., None] * inv
        return jnp.cos(angle) * scale, jnp.sin(angle) * scale

    def base(self) -> np.ndarray:
        """theta ** (-2i / dim), float32."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        return (1.0 / np.float32(self["rope_theta"]) ** exponent).astype(np.float32)


def rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int, **kw: Any) -> Rope:
    """A `Rope` from a config's `rope_parameters` (one type's, not nested).

    Raises:
        ConfigError: for a type this library does not have, or one whose fields are missing.
    """
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()
    }
    kind = fields.setdefault("rope_type", "default")
    ROPE_TYPES[kind]
    needed = ("rope_theta", *_REQUIRED.get(kind, ()))
    missing = [f for f in needed if fields.get(f) is None]
    if missing:
        raise ConfigError(
            f"rope_parameters of type {kind!r} lacks {', '.join(missing)}; found "
            f"{dict(parameters)}."
        )
    dim = int(head_dim * (fields.get("partial_rotary_factor") or 1.0))
    lists = {f for f in needed if f in ("short_factor", "long_factor")}
    bad = {f: fields[f] for f in needed if f not in lists and not _positive(fields[f])}
    bad |= {f: x for f, x in fields.items() if isinstance(x, Mapping)}
    if bad:
        listed = ", ".join(f"{f}={x!r}" for f, x in bad.items())
        raise ConfigError(
            f"rope_parameters of type {kind!r} says {listed}; expected numbers above 0."
        )
    for f in lists:
        if not isinstance(fields[f], tuple) or not all(map(_positive, fields[f])):
            raise ConfigError(f"{f} is {fields[f]!r}; expected a list of numbers above 0.")
        if len(fields[f]) != dim // 2:
            raise ConfigError(f"{f} has {len(fields[f])} numbers; {dim} channels need {dim // 2}.")
    return Rope(dim, max_positions, tuple(sorted(fields.items())), **kw)


def _positive(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf


_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
    """Turn the first 2 * half channels of each head. x: (B, T, heads, H), cos and sin: (B, T,
    half).
    """
    dim = 2 * cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned, rest = x[..., :dim].astype(cos.dtype), x[..., dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, -1)
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    y = y.astype(x.dtype)
    return jnp.concatenate([y, rest], -1) if rest.shape[-1] else y


def default(r: Rope, length: jax.Array | None) -> Frequencies:
    return r.base(), 1.0


def linear(r: Rope, length: jax.Array | None) -> Frequencies:
    return r.base() / np.float32(r["factor"]), 1.0


def dynamic(r: Rope, length: jax.Array | None) -> Frequencies:
    """NTK-aware: the base grows with the length once that passes `max_positions`; no history is
    kept.
    """
    longest = jnp.maximum(r.max_positions if length is None else length, r.max_positions)
    grow = r["factor"] * longest.astype(jnp.float32) / r.max_positions - (r["factor"] - 1)
    theta = r["rope_theta"] * grow ** (r.dim / (r.dim - 2))
    exponent = np.arange(0, r.dim, 2, dtype=np.float32) / np.float32(r.dim)
    return 1.0 / theta**exponent, 1.0


def llama3(r: Rope, length: jax.Array | None) -> Frequencies:
    """Long waves are stretched by `factor`, short ones kept, and the ones between blended."""
    inv, low, high = r.base(), r["low_freq_factor"], r["high_freq_factor"]
    turns = r["original_max_position_embeddings"] * inv / (2 * math.pi)
    mix = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - mix) * inv / np.float32(r["factor"]) + mix * inv, 1.0


def yarn(r: Rope, length: jax.Array | None) -> Frequencies:
    """YaRN (arXiv 2309.00071): interpolate by wave length, and sharpen attention by the length
    factor.
    """
    factor, old = r["factor"], r["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return r.dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(r["rope_theta"]))

    low, high = channel(r.get("beta_fast", 32)), channel(r.get("beta_slow", 1))
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(r.dim // 2) - low) / width, 0, 1).astype(np.float32)
    inv = r.base()
    return inv / np.float32(factor) * ramp + inv * (1 - ramp), _yarn_magnitude(r, factor)


def _yarn_magnitude(r: Rope, factor: float) -> float:
    gain = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    given = r.get("attention_factor")
    if given is not None:
        return given
    if r.get("mscale") and r.get("mscale_all_dim"):
        return gain(r["mscale"]) / gain(r["mscale_all_dim"])
    return gain(1.0)


def longrope(r: Rope, length: jax.Array | None) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): a factor for each channel, of two kinds: for texts that are no
    longer than those of pretraining, and for all positions of longer ones.
    """
    old = r["original_max_position_embeddings"]
    short, long = (r.base() / np.float32(r[f"{kind}_factor"]) for kind in ("short", "long"))
    inv = short if length is None else jnp.where(length > old, long, short)
    factor = r.get("factor", r.max_positions / old)
    gain = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 else 1.0
    return inv, r.get("attention_factor", gain)


for _kind in (default, linear, dynamic, llama3, yarn, longrope):
    ROPE_TYPES.register(_kind.__name__, _kind)
