"""The last tokens only: what a layer with a window can still see."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache.dense import AXES
from flaxen.cache.layout import KeysValues, NewTokens, put
from flaxen.core.tree import module


@module
class Ring(KeysValues):
    """Keys and values as (B, K, window, H): the token at position p stands at p modulo the window.

    Each row goes its own way, as positions count real tokens only; padding takes no place.
    """

    endless: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[-2]

    def write(self, stored: Any, new: Any, at: NewTokens) -> Any:
        last = at.valid & (at.positions >= at.lengths[:, None] - self.window)
        places = jnp.where(last, at.positions % self.window, self.window)
        return put(stored, new, places, AXES, at.placement)

    def read(self, at: NewTokens | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        k, v = (self.codec.decode(x, dtype).swapaxes(1, 2) for x in (self.k, self.v))
        return k, v

    def seen(self, scene: Scene, at: NewTokens) -> Scene:
        positions = self.positions(at.lengths)
        return dataclasses.replace(
            scene, q_slots=at.positions, k_slots=positions, keep=positions >= 0
        )

    def positions(self, lengths: jax.Array) -> jax.Array:
        """(B, window): whose keys stand at each place once a row has so many tokens; negative where
        nobody's do.
        """
        newest = lengths[:, None] - 1
        return newest - (newest - jnp.arange(self.window)) % self.window

    def remember(
        self, k: jax.Array, v: jax.Array, at: NewTokens, scene: Scene
    ) -> tuple[Any, jax.Array, jax.Array, Scene]:
        """Several tokens push out what the first of them still sees: they look at what was there
        before, and at each other.
        """
        if scene.aligned or k.shape[1] == 1:
            return super().remember(k, v, at, scene)
        old = self.positions(at.lengths - at.valid.sum(1, dtype=jnp.int32))
        past = self.read(at, k.dtype)
        k_all, v_all = (
            jnp.concatenate([before, self.stored(new)], 1)
            for before, new in zip(past, (k, v), strict=True)
        )
        scene = dataclasses.replace(
            scene,
            q_slots=at.positions,
            k_slots=jnp.concatenate([old, at.positions], 1),
            keep=jnp.concatenate([old >= 0, at.valid], 1),
        )
        return self.append(k, v, at), k_all, v_all, scene
