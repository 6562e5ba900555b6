"""What every cache layout has in common.

B batch, T new tokens, S slots, K kv_heads, H head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from flaxen.attention import Scene
from flaxen.cache.codec import Codec, width
from flaxen.core.tree import module, static
from flaxen.shard import Placement
from flaxen.shard.specs import ways


@module
class NewTokens:
    """Tokens about to enter a cache, and where: what all layers share.

    slot: that of the first, the same for every row; valid: (B, T) False for padding;
    positions: (B, T) how many real tokens of the row stand before each; lengths: (B,) real tokens,
    these included; table: (B, pages) if there are pages; room: True where all fit, None if they
    always do; placement: how caches are cut.
    """

    slot: jax.Array
    valid: jax.Array
    positions: jax.Array
    lengths: jax.Array
    table: jax.Array | None = None
    room: jax.Array | None = None
    placement: static[Placement | None] = None


class Layout:
    """What one layer remembers. codec: how it is stored; endless: it never runs out of room."""

    codec: Codec
    endless: ClassVar[bool] = False

    @property
    def token(self) -> tuple[int, ...]:
        """The sizes of what a token leaves behind, however it is stored."""
        raise NotImplementedError

    def grown(self, more: int) -> Any:
        """The same content with room for `more` slots (or pages)."""
        return self

    def stored(self, x: jax.Array) -> jax.Array:
        """What is left of vectors once they are stored."""
        return self.codec.decode(self.codec.encode(x), x.dtype)


@module
class KeysValues(Layout):
    """Keys and values, unrepeated and head-major, as the codec stores them."""

    k: Any
    v: Any
    codec: static[Codec]

    @property
    def token(self) -> tuple[int, ...]:
        first = jax.tree.leaves(self.k)[0]
        return (*first.shape[:-4], first.shape[-3], width(self.k), width(self.v))

    def append(self, k: jax.Array, v: jax.Array, at: NewTokens) -> Any:
        """Store new keys and values, (B, T, K, H)."""
        return dataclasses.replace(
            self,
            k=self.write(self.k, self.codec.encode(k), at),
            v=self.write(self.v, self.codec.encode(v), at),
        )

    def write(self, stored: Any, new: Any, at: NewTokens) -> Any:
        """Put encoded vectors, (B, T, K, ...), where they belong."""
        raise NotImplementedError

    def read(self, at: NewTokens | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """All keys and values as attention wants them: (B, S, K, H)."""
        raise NotImplementedError

    def seen(self, scene: Scene, at: NewTokens) -> Scene:
        """Where the keys that `read` gives stand, and which of them exist."""
        return scene

    def remember(
        self, k: jax.Array, v: jax.Array, at: NewTokens, scene: Scene
    ) -> tuple[Any, jax.Array, jax.Array, Scene]:
        """Store new keys and values; give the cache, and what their queries may look at.

        Attention always sees what is stored, so it does not matter in what pieces a text comes.
        """
        cache = self.append(k, v, at)
        if scene.aligned:
            return cache, self.stored(k), self.stored(v), scene
        return cache, *cache.read(at, k.dtype), cache.seen(scene, at)


def put(
    stored: Any, new: Any, places: jax.Array, axes: tuple[str, ...], placement: Placement | None
) -> Any:
    """Write `new` (B, T, ...) at `places` (B, T) along the axis `keys` of `stored`; a place that
    does not exist is left out. Each device writes to its own slots, and nothing else moves.
    """
    axis = axes.index("keys")

    def here(old: jax.Array, new: jax.Array, places: jax.Array, first: Any = 0) -> jax.Array:
        size, places = old.shape[axis], places - first
        places = jnp.where((places >= 0) & (places < size), places, size)
        rows = jnp.arange(places.shape[0])[:, None]
        between = (slice(None),) * (axis - 1)
        return old.at[(rows, *between, places)].set(new, mode="drop")

    def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        cut = cut_keys(old, axes, placement)
        if cut is None or placement is None:
            return here(old, new, places)
        spec = placement.activation_spec(old.shape, axes)
        rest = [entry for i, entry in enumerate(spec) if i not in (0, axis)]
        own = old.shape[axis] // ways(placement.mesh, cut)
        return jax.shard_map(
            lambda old, new, places: here(old, new, places, jax.lax.axis_index(cut) * own),
            mesh=placement.mesh,
            in_specs=(spec, P(spec[0], None, *rest), P(spec[0], None)),
            out_specs=spec,
            check_vma=False,
        )(old, new, places)

    return jax.tree.map(leaf, stored, new)


def cut_keys(x: jax.Array, axes: tuple[str, ...], placement: Placement | None) -> Any:
    """The mesh axes that cut the slots of an array, or None."""
    if placement is None:
        return None
    return placement.activation_spec(x.shape, axes)[axes.index("keys")]
