"""The decoder skeleton: embed, layers, norm, head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache import Cache, Dense
from flaxen.core.tree import module, static, walk
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.cross_entropy import linear_cross_entropy, only_tokens
from flaxen.layers.linear import Embedding, Linear, PositionTable
from flaxen.layers.runtime import PLAIN, Runtime
from flaxen.models.fold import for_each, run


@module
class Decoder:
    """A causal language model. `lm_head` is None when the head is tied to the embeddings;
    `embed_positions` is there when positions are learned.
    """

    embed_tokens: Embedding
    layers: Any
    norm: Any
    embed_positions: PositionTable | None = None
    lm_head: Linear | None = None
    logit_softcap: static[float | None] = None

    def context(
        self, positions: jax.Array, scene: Scene, runtime: Runtime, at: jax.Array | None = None
    ) -> Context:
        """What the layers look at, with each distinct rope's tables computed once."""
        attentions = (m for m in walk(self.layers) if isinstance(m, Attention))
        ropes = tuple(dict.fromkeys(a.rope for a in attentions if a.rope is not None))
        return Context(
            positions=positions,
            scene=scene,
            rotary=tuple(rope.tables(positions) for rope in ropes),
            at=at,
            ropes=ropes,
            runtime=runtime,
        )

    def hidden(
        self, ids: jax.Array, ctx: Context, caches: Any = None, collect: bool = False
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        """ids (B, T) -> normalised hidden states (B, T, D), caches, and if `collect` the residual
        stream before and after each layer.
        """
        x = self.embed_tokens(ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(ctx.positions)
        x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        first = x
        x, caches, states = run(self.layers, x, ctx, caches, collect)
        x = self.norm(x)
        return x, caches, (first, *states[:-1], x) if collect else ()

    def logits(self, x: jax.Array, runtime: Runtime) -> jax.Array:
        """(..., D) -> (..., V); -inf for rows of the head that are padding."""
        y = self.lm_head(x) if self.lm_head is not None else self.embed_tokens.attend(x)
        y = runtime.constrain(y, *("batch", "seq")[: y.ndim - 1], "vocab")
        y = self.logit_softcap * jnp.tanh(y / self.logit_softcap) if self.logit_softcap else y
        vocab = self.embed_tokens.vocab
        return y if vocab is None else only_tokens(y, vocab)

    def loss(self, ids: jax.Array, labels: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Sum of -log p over targets, and their number; labels (B, T) stand at the slot that
        predicts them, -100 is ignored.

        The (B, T, V) scores are never held at once.
        """
        x, _, _ = self.hidden(ids, ctx)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            head.weight,
            labels.reshape(-1),
            bias=None if self.lm_head is None else self.lm_head.bias,
            softcap=self.logit_softcap,
            vocab=self.embed_tokens.vocab,
        )

    def init_cache(
        self, batch: int, length: int, dtype: Any = None, runtime: Runtime = PLAIN
    ) -> Cache:
        """An empty cache with `length` slots for each of `batch` rows; sizes come from the weights'
        shapes.
        """
        zeros = lambda shape, axes, kind: jnp.zeros(
            shape,
            kind,
            device=runtime.placement.activation(shape, axes) if runtime.placement else None,
        )
        kind = dtype or self.embed_tokens.weight.dtype
        axes = ("batch", "kv_heads", "keys", "head_dim")

        def one(block: Any, *stack: int) -> Dense:
            def empty(proj: Linear) -> jax.Array:
                heads, head_dim = proj.weight.shape[-3:-1]
                shape = (*stack, batch, heads, length, head_dim)
                return zeros(shape, ("layers",) * len(stack) + axes, kind)

            return Dense(k=empty(block.self_attn.k_proj), v=empty(block.self_attn.v_proj))

        return Cache(
            layers=for_each(self.layers, one),
            index=zeros((), (), jnp.int32),
            keep=zeros((batch, length), ("batch", "keys"), jnp.bool_),
            lengths=zeros((batch,), ("batch",), jnp.int32),
        )
