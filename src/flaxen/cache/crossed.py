"""Keys and values of another sequence: made once, and read at every step."""

from __future__ import annotations

import jax

from flaxen.cache.codec import Codec
from flaxen.cache.dense import Dense
from flaxen.core.tree import module


@module
class Crossed(Dense):
    """As a dense cache, of a sequence to which nothing is added."""

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, codec: Codec) -> Crossed:
        """k, v: (B, S, K, H)."""
        k, v = (codec.encode(x.swapaxes(1, 2)) for x in (k, v))
        return cls(k=k, v=v, codec=codec)

    def grown(self, more: int) -> Crossed:
        return self
