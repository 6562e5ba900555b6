"""Towers of models of texts and pictures, each by itself."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.tree import module
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear
from flaxen.layers.norm import Identity
from flaxen.models.heads import Bare, Head, Last
from flaxen.models.outputs import EncoderOutput, ImageVectorOutput, TextVectorOutput
from flaxen.models.vision import ImageEncoder


def unit(x: jax.Array) -> jax.Array:
    """x (..., F), each vector of length one."""
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


@module
class PooledText(Bare):
    """pool: which slot speaks for a text; head: what becomes of it."""

    pool: Any
    head: Any = Identity()
    own_vectors: ClassVar[bool] = True

    @property
    def whole_rows(self) -> bool:  # type: ignore[override]
        return self.pool.whole_rows

    def __call__(self, last: Last) -> EncoderOutput:
        return EncoderOutput(last_hidden_state=last.states, pooler_output=self.pooled(last))

    def pooled(self, last: Last) -> jax.Array:
        """(R, F)."""
        return self.head(self.pool(last.states, last.ids))

    def vectors(self, last: Last) -> jax.Array:
        return unit(self.pooled(last))


@module
class ProjectedText(Head):
    """What is compared with pictures, as it comes: not of length one."""

    pool: Any
    projection: Linear
    targets: ClassVar[tuple[str, ...]] = ()
    own_vectors: ClassVar[bool] = True
    name: ClassVar[str] = "texts beside pictures"

    @property
    def whole_rows(self) -> bool:  # type: ignore[override]
        return self.pool.whole_rows

    def __call__(self, last: Last) -> TextVectorOutput:
        vector = self.projection(self.pool(last.states, last.ids))
        return TextVectorOutput(text_embeds=vector, last_hidden_state=last.states)

    def vectors(self, last: Last) -> jax.Array:
        return unit(self(last).text_embeds)

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        return targets


@module
class PictureTower(ImageEncoder):
    """Pictures to states and the pooler's vectors, or those that are compared with texts."""

    projection: Linear | None = None

    def bare(self) -> bool:
        return self.projection is None

    def output(self, x: jax.Array, ctx: Context) -> EncoderOutput | ImageVectorOutput:
        pooler = self.tower.pooler
        pooled = None if pooler is None else pooler(x, ctx)
        if self.projection is None:
            return EncoderOutput(last_hidden_state=x, pooler_output=pooled)
        assert pooled is not None  # only towers that pool have a projection
        return ImageVectorOutput(image_embeds=self.projection(pooled), last_hidden_state=x)
