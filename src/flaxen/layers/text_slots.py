"""Which slot of a text speaks for all of it: states (B, T, D) and ids (B, T) -> (B, D)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static


def _at(x: jax.Array, slots: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, slots[:, None, None], axis=1)[:, 0]


@module
class HighestId:
    """The first one of the token with the highest number, as CLIP's end of text was at first."""

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return _at(x, jnp.argmax(ids, axis=1))


@module
class FirstOf:
    """The first one of this token; the first slot where there is none."""

    token: static[int]

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return _at(x, jnp.argmax(ids == self.token, axis=1))


@module
class LastSlot:
    """Whatever stands last, padding or not."""

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return x[:, -1]
