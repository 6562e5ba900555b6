"""The newest state only: what recurrent layers remember."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.cache.codec import Codec, width
from flaxen.cache.layout import Layout, NewTokens
from flaxen.core.tree import module, static


@module
class Recurrent(Layout):
    """conv: (B, C, W) the last inputs of a short convolution; state: (B, N, P, S)."""

    conv: Any
    state: Any
    codec: static[Codec]

    endless: ClassVar[bool] = True

    @property
    def token(self) -> tuple[int, ...]:
        conv, state = (jax.tree.leaves(x)[0].shape for x in (self.conv, self.state))
        return (*conv[:-3], conv[-2], width(self.conv), *state[-3:-1], width(self.state))

    def append(self, conv: jax.Array, state: jax.Array, at: NewTokens) -> Recurrent:
        """Put the states after the new tokens in place of the old ones, which stay, bit by bit,
        in rows that have padding only.

        Within a row, it is for the layer to pass over padding.
        """
        rows = at.valid.any(1)

        def newer(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return Recurrent(
            conv=jax.tree.map(newer, self.conv, self.codec.encode(conv)),
            state=jax.tree.map(newer, self.state, self.codec.encode(state)),
            codec=self.codec,
        )

    def states(self) -> tuple[jax.Array, jax.Array]:
        """conv and state."""
        conv, state = (self.codec.decode(x, self.codec.dtype) for x in (self.conv, self.state))
        return conv, state
