"""What calling a model gives back, under Hugging Face's names."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.core.tree import module


@module
class CausalOutput:
    """logits: (B, T, V) float; loss: scalar, if labels were given; hidden_states: embeddings, then
    each layer's (B, T, D), if asked; attentions: each layer's (B, N, T, T), if asked; aux_loss:
    that of routers, before its coefficient, and router_logits: (B * T, experts) of each layer that
    has experts, if asked.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None
    aux_loss: jax.Array | None = None
    router_logits: tuple[jax.Array, ...] | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        """What there is, in Hugging Face's order: losses first, if there are any."""
        first = ("loss", "aux_loss", "logits")
        rest = (f.name for f in dataclasses.fields(self) if f.name not in first)
        return tuple(x for x in (getattr(self, name) for name in (*first, *rest)) if x is not None)


@module
class SeeingOutput(CausalOutput):
    """Of a language model that sees. image_hidden_states: (N, D), what stands in the places of
    pictures, if there are any; rope_deltas: (B, 1), how much further the next position is than the
    number of tokens, where pictures count otherwise than words do.
    """

    image_hidden_states: jax.Array | None = None
    rope_deltas: jax.Array | None = None


class _Headed:
    """A loss first, if there is one, then what else there is, in Hugging Face's order."""

    def to_tuple(self: Any) -> tuple[Any, ...]:
        """What there is."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return tuple(x for x in values if x is not None)


@module
class EncoderOutput(_Headed):
    """last_hidden_state: (B, T, D); pooler_output: (B, D), where the model has a pooler;
    hidden_states: embeddings, then each layer's (B, T, D), if asked; attentions: each layer's
    (B, N, T, T), if asked.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None = None
    loss: jax.Array | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class TextVectorOutput(_Headed):
    """text_embeds: (B, F), to compare with those of pictures; the rest as in `EncoderOutput`."""

    text_embeds: jax.Array
    last_hidden_state: jax.Array
    loss: None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class ImageVectorOutput(_Headed):
    """image_embeds: (B, F), to compare with those of texts; the rest as in `EncoderOutput`."""

    image_embeds: jax.Array
    last_hidden_state: jax.Array
    loss: None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class LogitsOutput(_Headed):
    """logits: (B, T, V) of tokens, (B, T, L) of labels for each token, (B, L) for each row, or
    (B, C) of choices; loss: scalar, if labels were given; the rest as in `EncoderOutput`.
    """

    loss: jax.Array | None = None
    logits: jax.Array
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class SpanOutput(_Headed):
    """start_logits, end_logits: (B, T); the rest as in `LogitsOutput`."""

    loss: jax.Array | None = None
    start_logits: jax.Array
    end_logits: jax.Array
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class PretrainingOutput(_Headed):
    """prediction_logits: (B, T, V); seq_relationship_logits: (B, 2), does the second text follow
    the first; the rest as in `LogitsOutput`.
    """

    loss: jax.Array | None = None
    prediction_logits: jax.Array
    seq_relationship_logits: jax.Array
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None


@module
class TwoTowersOutput:
    """logits_per_image: (images, texts), how alike they are, and logits_per_text its transpose;
    text_embeds and image_embeds: (B, F), of length one; the outputs of both models; loss: scalar,
    if asked. What was not given is None.
    """

    loss: jax.Array | None = None
    logits_per_image: jax.Array | None = None
    logits_per_text: jax.Array | None = None
    text_embeds: jax.Array | None = None
    image_embeds: jax.Array | None = None
    text_model_output: EncoderOutput | None = None
    vision_model_output: EncoderOutput | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        """What there is, outputs of models as tuples of their own."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        plain = (x.to_tuple() if isinstance(x, EncoderOutput) else x for x in values)
        return tuple(x for x in plain if x is not None)


@module
class Seq2SeqStates(_Headed):
    """last_hidden_state: the decoder's (B, T, D); encoder_last_hidden_state: (B, S, D); hidden
    states of each side: embeddings, then each layer's, if asked; attentions: each layer's
    (B, N, T, T), and (B, N, T, S) where the decoder looks at the encoder, if asked.
    """

    last_hidden_state: jax.Array
    decoder_hidden_states: tuple[jax.Array, ...] | None = None
    decoder_attentions: tuple[jax.Array, ...] | None = None
    cross_attentions: tuple[jax.Array, ...] | None = None
    encoder_last_hidden_state: jax.Array | None = None
    encoder_hidden_states: tuple[jax.Array, ...] | None = None
    encoder_attentions: tuple[jax.Array, ...] | None = None


@module
class Seq2SeqOutput(_Headed):
    """logits: (B, T, V); loss: scalar, if labels were given; the rest as in `Seq2SeqStates`."""

    loss: jax.Array | None = None
    logits: jax.Array
    decoder_hidden_states: tuple[jax.Array, ...] | None = None
    decoder_attentions: tuple[jax.Array, ...] | None = None
    cross_attentions: tuple[jax.Array, ...] | None = None
    encoder_last_hidden_state: jax.Array | None = None
    encoder_hidden_states: tuple[jax.Array, ...] | None = None
    encoder_attentions: tuple[jax.Array, ...] | None = None
