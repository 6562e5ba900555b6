"""Descriptions of attention: small, hashable, readable by a mechanism before any array exists."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from flaxen.attention.settings import AttentionSettings
from flaxen.core.errors import ConfigError
from flaxen.core.tree import module, static
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which slots a query may see, besides those that the scene hides.

    window: how many keys up to and with itself (4: it and three before); without `causal`, all that
    are at most `window` away. chunk: only those of its own piece of `chunk` tokens. prefix: the
    first `Scene.prefix` tokens of a row are seen by all of them.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: a window or a piece in which a token would not even see itself.
        """
        least = 1 if self.causal else 0
        if self.window is not None and self.window < least:
            raise ConfigError(
                f"A window (sliding_window in most configs) of {self.window} tokens shows nothing; "
                f"expected {least} or more, or null where there is none."
            )
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(
                f"attention_chunk_size is {self.chunk}; expected 1 or more, or null for one piece."
            )


@module
class Scene:
    """Where queries and keys stand in their sequence, and which keys exist.

    q_slots: (T,) or (B, T), k_slots: (S,) or (B, S) slot numbers;
    keep: (B, S) False for padding and unused slots;
    q_segments (B, T), k_segments (B, S): documents packed into a row see only themselves;
    prefix: (B,) length of what is seen in both directions.
    `aligned` says that query i stands at key i, so that a mechanism may skip the upper triangle.
    """

    q_slots: jax.Array
    k_slots: jax.Array
    keep: jax.Array | None = None
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    prefix: jax.Array | None = None
    aligned: static[bool] = False


@module
class Extras:
    """What one layer adds to its scores; absent parts are None.

    bias: (B or 1, N or 1, T, S), added after scaling and softcap. slopes: (N,) ALiBi, which takes
    slope * distance off. sinks: (N,) one more score for each head, whose value is zero.
    dropout_key: for a call with `dropout`.
    """

    bias: jax.Array | None = None
    slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    dropout_key: jax.Array | None = None


NOTHING = Extras()


def visible(mask: Mask, scene: Scene) -> jax.Array:
    """The mask spelled out: (B or 1, T, S), True where a query sees a key."""
    q, k = scene.q_slots[..., :, None], scene.k_slots[..., None, :]
    see = jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)
    if mask.causal:
        see = see & (k <= q)
    if mask.window:
        see = see & ((q - k < mask.window) if mask.causal else (abs(q - k) <= mask.window))
    if mask.chunk:
        see = see & (q // mask.chunk == k // mask.chunk)
    see = see if see.ndim == 3 else see[None]
    if mask.prefix and scene.prefix is not None:
        first = scene.prefix[:, None, None]
        see = see | ((q < first) & (k < first))
    if scene.keep is not None:
        see = see & scene.keep[:, None, :]
    if scene.q_segments is not None and scene.k_segments is not None:
        see = see & (scene.q_segments[:, :, None] == scene.k_segments[:, None, :])
    return see


def without_unseen(
    k: jax.Array, v: jax.Array, mask: Mask, scene: Scene
) -> tuple[jax.Array, jax.Array]:
    """Keys and values, (B, S, K, H), with zeros where no query sees them: whatever an unused slot
    holds, 0 times it must be 0.
    """
    # An aligned query sees its own key.
    seen = scene.keep if scene.aligned else visible(mask, scene).any(axis=1)
    if seen is None:
        return k, v
    seen = seen[:, :, None, None]
    return jnp.where(seen, k, 0), jnp.where(seen, v, 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about one attention call except its arrays.

    padded, packed: the scene hides keys, or has segments. bias, alibi, sinks: what the extras have.
    placement: the mesh that the arrays lie on.
    """

    mask: Mask
    scale: float
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    platform: str
    aligned: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    padded: bool = False
    packed: bool = False
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    placement: Placement | None = None
    settings: AttentionSettings = AttentionSettings()

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.kv_heads
