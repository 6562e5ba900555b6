"""Texts and pictures in one space: a model for each, and how alike what they make is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.linear import Embedding
from flaxen.layers.norm import Identity
from flaxen.layers.runtime import Runtime
from flaxen.models.encoder import Encoder
from flaxen.models.inputs import fitting, token_ids
from flaxen.models.losses import cross_entropy
from flaxen.models.outputs import EncoderOutput, TwoTowersOutput
from flaxen.models.skeleton import How, Skeleton
from flaxen.models.vision import Tower, seen

Loss = Callable[[jax.Array], jax.Array]


@module
class TwoTowers(Skeleton):
    """text and vision make states; text_pool and the vision tower's pooler one vector of each row;
    text_head what is called the text's pooler_output; the projections what is compared.

    logit_scale: a logarithm, () or (1,); logit_bias: what is added; loss: of logits_per_text whose
    n-th row and column belong together.
    """

    text: Encoder
    vision: Tower
    text_pool: Any
    text_head: Any = Identity()
    text_projection: Any = Identity()
    visual_projection: Any = Identity()
    logit_scale: Any
    logit_bias: Any = None
    loss: static[Loss]

    @property
    def embed_tokens(self) -> Embedding:
        return self.text.embed_tokens

    def kind(self) -> str:
        return "a model of texts and pictures in one space"

    def takes(self) -> tuple[str, ...]:
        texts = ("input_ids", "attention_mask", "position_ids")
        return (*texts, "pixel_values", "interpolate_pos_encoding", "return_loss")

    def needs(self) -> tuple[str, ...]:
        return "input_ids", "pixel_values"

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        return self.text.features(ids, mask, runtime, dropout_key)

    def call(
        self,
        how: How,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        pixel_values: Any = None,
        interpolate_pos_encoding: Any = None,
        return_loss: Any = None,
        **_: Any,
    ) -> TwoTowersOutput:
        """What is alike in texts (B, T) and pictures (B', C, H, W); of one kind alone, its
        vectors.
        """
        ids, pixels, fit = None, None, lambda name, x: x
        if input_ids is not None:
            ids = token_ids(input_ids, self.embed_tokens.vocab_size)
            self.text.check_length(ids.shape[1])
            fit = partial(fitting, ids.shape)
        if pixel_values is not None:
            pixels = self.vision.check(pixel_values, interpolate_pos_encoding)
        if return_loss and (ids is None or pixels is None or len(ids) != len(pixels)):
            raise InputError("return_loss=True needs as many texts as pictures: pairs of them.")
        return forward(
            self,
            ids,
            fit("attention_mask", attention_mask),
            fit("position_ids", position_ids),
            pixels,
            how.dropout_key,
            runtime=how.runtime,
            loss=bool(return_loss),
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def read(
        self,
        ids: jax.Array,
        mask: jax.Array | None,
        positions: jax.Array | None,
        runtime: Runtime,
        key: jax.Array | None,
        collect: bool,
    ) -> tuple[EncoderOutput, jax.Array]:
        """What the text model gives, with what of it is asked for, and vectors (B, F)."""
        placed = self.text.count(ids) if positions is None else positions
        ctx = self.text.context(placed, None if mask is None else mask.astype(bool), runtime, key)
        x, states = self.text.hidden(ids, None, ctx, collect)
        with runtime.products():
            pooled = self.text_head(self.text_pool(x, ids))
            vector = _unit(self.text_projection(pooled))
        looked = seen(self.text.layers, states, ctx) if collect else None
        return _output(x, pooled, states if collect else None, looked), vector

    def look(
        self, pixels: jax.Array, runtime: Runtime, key: jax.Array | None, collect: bool
    ) -> tuple[EncoderOutput, jax.Array]:
        """What the vision model gives, and vectors (B, F)."""
        x, states, ctx = self.vision.hidden(pixels, runtime, key, collect)
        with runtime.products():
            pooled = self.vision.pooler(x, ctx)
            vector = _unit(self.visual_projection(pooled))
        looked = seen(self.vision.layers, states, ctx) if collect else None
        return _output(x, pooled, states if collect else None, looked), vector


@partial(jax.jit, static_argnames=("runtime", "loss", "hidden_states", "attentions"))
def forward(
    model: TwoTowers,
    ids: jax.Array | None,
    mask: jax.Array | None,
    positions: jax.Array | None,
    pixels: jax.Array | None,
    key: jax.Array | None,
    *,
    runtime: Runtime,
    loss: bool = False,
    hidden_states: bool = False,
    attentions: bool = False,
) -> TwoTowersOutput:
    """Vectors of what is given, and of both how alike they are."""
    collect = hidden_states or attentions
    found: dict[str, Any] = {}
    asked = partial(_asked, hidden_states=hidden_states, attentions=attentions)
    if ids is not None:
        out, found["text_embeds"] = model.read(ids, mask, positions, runtime, key, collect)
        found["text_model_output"] = asked(out)
    if pixels is not None:
        inner = None if key is None else jax.random.fold_in(key, 1)
        out, found["image_embeds"] = model.look(pixels, runtime, inner, collect)
        found["vision_model_output"] = asked(out)
    if ids is not None and pixels is not None:
        texts, images = found["text_embeds"], found["image_embeds"]
        with runtime.products():
            logits = texts @ images.T * jnp.exp(model.logit_scale).astype(texts.dtype)
        if model.logit_bias is not None:
            logits = logits + model.logit_bias.astype(logits.dtype)
        found |= {"logits_per_text": logits, "logits_per_image": logits.T}
        found["loss"] = model.loss(logits) if loss else None
    return TwoTowersOutput(**found)


def _output(*parts: Any) -> EncoderOutput:
    names = ("last_hidden_state", "pooler_output", "hidden_states", "attentions")
    return EncoderOutput(**dict(zip(names, parts, strict=True)))


def _asked(out: EncoderOutput, hidden_states: bool, attentions: bool) -> EncoderOutput:
    return dataclasses.replace(
        out,
        hidden_states=out.hidden_states if hidden_states else None,
        attentions=out.attentions if attentions else None,
    )


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


def contrastive(logits: jax.Array) -> jax.Array:
    """CLIP's loss: each text picks its picture among all, and each picture its text."""
    pairs = jnp.arange(len(logits))
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def pairwise(logits: jax.Array) -> jax.Array:
    """SigLIP's loss: of each text and picture alone, whether they belong together."""
    sign = 2 * jnp.eye(len(logits), dtype=logits.dtype) - 1
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(sign * logits), -1))
