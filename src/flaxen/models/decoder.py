"""The decoder skeleton: embed, layers, norm, head."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache import Cache, NewTokens, Order, described, empty
from flaxen.core.tree import module, static, walk
from flaxen.layers.attention import Attends
from flaxen.layers.context import Context
from flaxen.layers.cross_entropy import Scoring, linear_cross_entropy, only_tokens
from flaxen.layers.dropout import dropout
from flaxen.layers.linear import Embedding, Linear, PositionTable
from flaxen.layers.norm import Identity
from flaxen.layers.runtime import PLAIN, Runtime
from flaxen.layers.token_logps import token_logps
from flaxen.models.balance import RouterLoss
from flaxen.models.fold import for_each, run
from flaxen.models.skeleton import How, Skeleton


@module
class Decoder(Skeleton):
    """A causal language model. `lm_head` is None when the head is tied to the embeddings;
    `entry` is what these pass before the first layer, such as a norm; `embed_positions` is there
    when positions are learned; `dropout` is of the embeddings; `balance` is there when a
    training loss of its routers is known.
    """

    embed_tokens: Embedding
    entry: Any = Identity()
    layers: Any
    norm: Any
    embed_positions: PositionTable | None = None
    lm_head: Linear | None = None
    logit_softcap: static[float | None] = None
    logit_scale: static[float] = 1.0
    dropout: static[float] = 0.0
    balance: static[RouterLoss | None] = None

    generates: ClassVar[bool] = True

    def kind(self) -> str:
        return "a causal language model"

    def longest(self) -> int | None:
        table = self.embed_positions
        return None if table is None else table.weight.shape[0] - table.offset

    def takes(self) -> tuple[str, ...]:
        rows = ("input_ids", "attention_mask", "position_ids", "segment_ids", "labels")
        return *rows, "past_key_values", "extra_embedding", "vision_mask"

    def call(self, how: How, **inputs: Any) -> Any:
        """See `causal_call.call`; what runs a decoder imports this file."""
        from flaxen.models.causal_call import call

        return call(self, how, **inputs)

    def loss_alone(self, how: How, **inputs: Any) -> jax.Array:
        from flaxen.models.causal_call import loss_alone

        return loss_alone(self, how, **inputs)

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        from flaxen.models.causal import whole_context

        ctx = whole_context(self, ids.shape, runtime, mask, dropout_key=dropout_key)
        return self.hidden(ids, ctx)[0]

    def ties(self) -> dict[str, str]:
        return {"lm_head.weight": "embed_tokens.weight"} if self.lm_head is None else {}

    def context(
        self,
        positions: jax.Array,
        scene: Scene,
        runtime: Runtime,
        at: NewTokens | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Context:
        """What the layers look at, with each distinct rope's tables computed once."""
        attentions = (m for m in walk(self.layers) if isinstance(m, Attends))
        ropes = tuple(dict.fromkeys(a.rope for a in attentions if a.rope is not None))
        return Context(
            positions=positions,
            scene=scene,
            rotary=tuple(rope.tables(positions) for rope in ropes),
            at=at,
            dropout_key=dropout_key,
            ropes=ropes,
            runtime=runtime,
        )

    def hidden(
        self,
        ids: jax.Array,
        ctx: Context,
        caches: Any = None,
        collect: bool = False,
        extra: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        """ids (B, T) -> normalised hidden states (B, T, D), caches, and what is `collected` if
        `collect`. extra (B, T, D) is added to the embeddings of the ids.
        """
        with ctx.runtime.products():
            first = x = self.embedded(ids, ctx, extra)
            x, caches, states = run(self.layers, x, ctx, caches, collect)
            x = self.norm(x)
        return x, caches, self.collected(first, states, x) if collect else ()

    def collected(
        self, first: jax.Array, states: list[jax.Array], last: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The hidden states that a call gives: before and after each layer, the last normalised."""
        return first, *states[:-1], last

    def embedded(self, ids: jax.Array, ctx: Context, extra: jax.Array | None = None) -> jax.Array:
        """What the first layer is given, in the dtype that is computed in: (B, T, D)."""
        x = self.entry(self.embed_tokens(ids))
        if extra is not None:
            x = x + extra.astype(x.dtype)
        if self.embed_positions is not None:
            x = x + self.embed_positions(ctx.positions)
        x = ctx.runtime.constrain(ctx.runtime.computing(x), "batch", "seq", "embed")
        return dropout(x, self.dropout, ctx.of_layer(len(self.layers)).dropout_key)

    def logits(self, x: jax.Array, runtime: Runtime) -> jax.Array:
        """(..., D) -> (..., V); -inf for rows of the head that are padding."""
        with runtime.products():
            y = self.lm_head(x) if self.lm_head is not None else self.embed_tokens.attend(x)
        y = runtime.constrain(y, *("batch", "seq")[: y.ndim - 1], "vocab")
        y = y if self.logit_scale == 1.0 else y * jnp.asarray(self.logit_scale, y.dtype)
        y = self.logit_softcap * jnp.tanh(y / self.logit_softcap) if self.logit_softcap else y
        vocab = self.embed_tokens.vocab
        return y if vocab is None else only_tokens(y, vocab)

    def loss(
        self,
        ids: jax.Array,
        labels: jax.Array,
        ctx: Context,
        extra: jax.Array | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> tuple[jax.Array, jax.Array]:
        """Sum of -log p over targets, and their number; labels (B, T) stand at the slot that
        predicts them, -100 is ignored. extra: as in `hidden`; label_smoothing, z_loss: as of
        `linear_cross_entropy`.

        The (B, T, V) scores are never held at once.
        """
        x, _, _ = self.hidden(ids, ctx, extra=extra)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        with ctx.runtime.products():
            return linear_cross_entropy(
                x,
                head.weight,
                labels,
                bias=head.bias,
                softcap=self.logit_softcap,
                scale=self.logit_scale,
                vocab=self.embed_tokens.vocab,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                placement=ctx.runtime.placement,
            )

    def logps(
        self,
        ids: jax.Array,
        targets: jax.Array,
        ctx: Context,
        extra: jax.Array | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """log p of each target (B, T), which stands at the slot that predicts it, and if asked the
        entropy at each: float32, 0 where the target is -100. extra: as in `hidden`.

        The (B, T, V) scores are never held at once.
        """
        x, _, _ = self.hidden(ids, ctx, extra=extra)
        scoring, (weight, bias) = self.scoring()
        with ctx.runtime.products():
            return token_logps(
                x,
                weight,
                targets,
                bias=bias,
                scoring=scoring,
                temperature=temperature,
                entropy=entropy,
                placement=ctx.runtime.placement,
            )

    def scoring(self) -> tuple[Scoring, tuple[Any, Any]]:
        """How normalised hidden states are scored, and with which weight and bias."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        how = Scoring(1, self.logit_softcap, self.logit_scale, self.embed_tokens.vocab)
        return how, (head.weight, head.bias)

    def init_cache(
        self, batch: int, length: int, dtype: Any = None, runtime: Runtime = PLAIN
    ) -> Cache:
        """An empty cache with room for `length` tokens in each of `batch` rows."""
        return empty(self.cache_shapes(batch, length, dtype, runtime))

    def cache_shapes(
        self, batch: int, length: int, dtype: Any = None, runtime: Runtime = PLAIN
    ) -> Cache:
        """The shapes of a cache, which cost nothing: from those of the weights."""
        dtype = dtype or runtime.weights.dtype or self.embed_tokens.weight.dtype
        order = Order(batch, length, dtype, runtime.cache, runtime.placement)

        def one(block: Any, count: int | None = None) -> Any:
            return block.self_attn.cache(dataclasses.replace(order, layers=count))

        return described(order, for_each(self.layers, one))


@module
class LayersOnly(Decoder):
    """A decoder whose hidden states are, as in Transformers, the output of each layer, then the
    last one normalised; the embeddings are not among them.
    """

    def collected(
        self, first: jax.Array, states: list[jax.Array], last: jax.Array
    ) -> tuple[jax.Array, ...]:
        return *states, last
