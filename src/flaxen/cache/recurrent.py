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
    """conv: (B, channels..., W) the last inputs of each short convolution, as the codec stores
    them; state: (B, ...) float32 whatever the codec, as each step would round it again, or None
    for a layer that has no other memory than its convolutions.
    """

    conv: tuple[Any, ...]
    state: Any
    codec: static[Codec]

    endless: ClassVar[bool] = True

    @property
    def token(self) -> tuple[int, ...]:
        vectors = [*self.conv, *([] if self.state is None else [self.state])]
        sizes = ((*jax.tree.leaves(x)[0].shape[:-1], width(x)) for x in vectors)
        return tuple(n for each in sizes for n in each)

    def append(
        self, conv: tuple[jax.Array, ...], state: jax.Array | None, at: NewTokens
    ) -> Recurrent:
        """Put the states after the new tokens in place of the old ones, which stay, bit by bit,
        in rows that have padding only.

        Within a row, it is for the layer to pass over padding.
        """
        rows = at.valid.any(1)

        def newer(old: jax.Array, new: jax.Array) -> jax.Array:
            kept = rows.reshape(-1, *[1] * (old.ndim - 1))
            return jnp.where(kept, new.astype(old.dtype), old)

        encoded = tuple(self.codec.encode(x) for x in conv)
        return Recurrent(
            conv=jax.tree.map(newer, self.conv, encoded),
            state=jax.tree.map(newer, self.state, state),
            codec=self.codec,
        )

    def states(self) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """conv, in the dtype that they were made for, and state."""
        return tuple(self.codec.decode(x, self.codec.dtype) for x in self.conv), self.state
