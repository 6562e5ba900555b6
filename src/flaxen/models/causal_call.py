"""Calling a decoder with the inputs of a user: checked, then run whole or on top of a cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from flaxen.cache import Cache, fits
from flaxen.cache import room_for as check_room
from flaxen.layers.checkpointing import cache_in_training
from flaxen.layers.runtime import RINGS
from flaxen.models import causal
from flaxen.models.decoder import Decoder
from flaxen.models.inputs import (
    added_embedding,
    fitting,
    labels_of,
    new_tokens,
    only_new_tokens,
    token_ids,
)
from flaxen.models.outputs import CausalOutput
from flaxen.models.skeleton import How
from flaxen.models.switch import same_side


def call(
    decoder: Decoder,
    how: How,
    *,
    input_ids: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    segment_ids: Any = None,
    past_key_values: Any = None,
    labels: Any = None,
    extra_embedding: Any = None,
    vision_mask: Any = None,
) -> CausalOutput:
    """Logits of token ids (B, T). See `Model.__call__`."""
    vocab, width = decoder.embed_tokens.vocab_size, decoder.embed_tokens.weight.shape[-1]
    ids = token_ids(input_ids, vocab)
    positions = fitting(ids.shape, "position_ids", position_ids)
    extra = added_embedding(extra_embedding, vision_mask, (*ids.shape, width))
    training = how.train or labels is not None
    kept = cache_in_training(past_key_values, how.runtime.checkpointing, training, type(decoder))
    if kept is None:
        return causal.forward(
            decoder,
            ids,
            fitting(ids.shape, "attention_mask", attention_mask),
            positions,
            fitting(ids.shape, "segment_ids", segment_ids),
            labels_of(labels, ids.shape, vocab),
            extra,
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
            router_logits=how.router_logits,
        )
    only_new_tokens(
        segment_ids=segment_ids,
        labels=labels,
        output_attentions=how.attentions,
        output_hidden_states=how.hidden_states,
        output_router_logits=how.router_logits,
        train=how.train,
    )
    valid = room_for(decoder, kept, ids, attention_mask)
    in_place = how.runtime.purpose == "serve"
    run = causal.forward_in_place if in_place else causal.forward_cached
    return run(decoder, ids, kept, valid, positions, extra, runtime=how.runtime)


def loss_alone(
    decoder: Decoder,
    how: How,
    *,
    input_ids: Any,
    labels: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    segment_ids: Any = None,
) -> jax.Array:
    """The loss of `call`, without its logits."""
    vocab = decoder.embed_tokens.vocab_size
    ids = token_ids(input_ids, vocab)
    fit = partial(fitting, ids.shape)
    return causal.mean_loss(
        decoder,
        ids,
        labels_of(labels, ids.shape, vocab),
        fit("attention_mask", attention_mask),
        fit("position_ids", position_ids),
        fit("segment_ids", segment_ids),
        runtime=how.runtime,
    )


def room_for(decoder: Decoder, cache: Cache, ids: Any, attention_mask: Any) -> Any:
    """Which of the tokens are real, once it is sure that they fit into the cache."""
    fits(cache, decoder.cache_shapes(len(ids), 1, runtime=RINGS))
    valid = new_tokens(attention_mask, ids.shape, cache)
    same_side(decoder, cache, valid.sum(1))
    check_room(cache, valid)
    return valid
