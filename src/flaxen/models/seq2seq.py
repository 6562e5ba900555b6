"""An encoder-decoder with a head: scores of the next token of what is said."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.cache import Cache, Order, described
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.cross_entropy import linear_cross_entropy, only_tokens
from flaxen.layers.linear import Linear, linear
from flaxen.layers.runtime import Runtime
from flaxen.models.encoder_decoder import EncoderDecoder, whole
from flaxen.models.fold import for_each
from flaxen.models.losses import cross_entropy
from flaxen.models.outputs import Seq2SeqOutput
from flaxen.models.skeleton import How


@module
class Seq2Seq(EncoderDecoder):
    """With a head. `lm_head` is None when tied to the embeddings; logits_bias: (V,), added to
    scores; head_scale: of the states before the head.
    """

    lm_head: Linear | None = None
    logits_bias: Any = None
    head_scale: static[float] = 1.0

    answers: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...]] = ("labels",)

    def kind(self) -> str:
        return "an encoder-decoder"

    def ties(self) -> dict[str, str]:
        tied = {"lm_head.weight": "embed_tokens.weight"} if self.lm_head is None else {}
        return tied | super().ties()

    def untied(self) -> Seq2Seq:
        """With a head of its own, as a description."""
        width, vocab = self.embed_tokens.weight.shape[1], self.embed_tokens.weight.shape[0]
        return dataclasses.replace(self, lm_head=linear({"embed": width}, {"vocab": vocab}))

    def logits(self, x: jax.Array, runtime: Runtime) -> jax.Array:
        """(..., D) -> (..., V); -inf for rows of the head that are padding."""
        x = self._scaled(x)
        with runtime.products():
            y = self.lm_head(x) if self.lm_head is not None else self.embed_tokens.attend(x)
        y = runtime.constrain(y, *("batch", "seq")[: y.ndim - 1], "vocab")
        y = y if self.logits_bias is None else y + self.logits_bias.astype(y.dtype)
        vocab = self.embed_tokens.vocab
        return y if vocab is None else only_tokens(y, vocab)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.head_scale == 1.0 else x * jnp.asarray(self.head_scale, x.dtype)

    def loss_alone(self, how: How, **inputs: Any) -> jax.Array:
        if inputs.get("labels") is None:
            raise InputError("A loss needs labels.")
        return mean_loss(self, *self.checked(inputs), runtime=how.runtime)

    def output(self, x: jax.Array, labels: Any, runtime: Runtime, sides: dict[str, Any]) -> Any:
        logits = self.logits(x, runtime)
        loss = None if labels is None else cross_entropy(logits, labels)
        return Seq2SeqOutput(logits=logits, loss=loss, **sides)

    def cache_shapes(self, batch: int, length: int, runtime: Runtime) -> Cache:
        """The shapes of a cache of the decoder's own tokens, `length` of them; the other half of
        each layer's comes with the first call.
        """
        dtype = runtime.weights.dtype or self.embed_tokens.weight.dtype
        order = Order(batch, length, dtype, runtime.cache, runtime.placement)

        def one(block: Any, count: int | None = None) -> Any:
            return block.self_attn.cache(dataclasses.replace(order, layers=count)), None

        return described(order, for_each(self.layers, one))


@partial(jax.jit, static_argnames=("runtime",))
def mean_loss(
    model: Seq2Seq,
    source: jax.Array,
    mask: jax.Array | None,
    ids: jax.Array,
    keep: jax.Array | None,
    labels: jax.Array,
    *,
    runtime: Runtime,
) -> jax.Array:
    """The loss of `forward`; the (B, T, V) logits are never held at once."""
    x, _, _ = whole(model, source, mask, ids, keep, runtime)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    with runtime.products():
        total, count = linear_cross_entropy(
            model._scaled(x),
            head.weight,
            labels,
            bias=model.logits_bias,
            vocab=model.embed_tokens.vocab,
            placement=runtime.placement,
        )
    return total / jnp.maximum(count, 1)
