"""Which slot of a text speaks for all of it: states (B, T, D) and ids (B, T) -> (B, D).

whole_rows: whether it was trained on rows of full length, whose padding is read like words.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static


def _at(x: jax.Array, slots: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, slots[:, None, None], axis=1)[:, 0]


@module
class HighestId:
    """The first one of the token with the highest number, as CLIP's end of text was at first."""

    whole_rows: ClassVar[bool] = False

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return _at(x, jnp.argmax(ids, axis=1))


@module
class FirstOf:
    """The first one of this token; the first slot where there is none."""

    token: static[int]
    whole_rows: ClassVar[bool] = False

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return _at(x, jnp.argmax(ids == self.token, axis=1))


@module
class LastSlot:
    """Whatever stands last, padding or not."""

    whole_rows: ClassVar[bool] = True

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return x[:, -1]
