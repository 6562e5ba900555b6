"""Running a decoder: whole sequences, and one step after another with a cache."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache import Cache
from flaxen.core.tree import walk
from flaxen.layers.attention import Attends
from flaxen.layers.context import Context
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.listening import listening
from flaxen.layers.positions import chunk_slots
from flaxen.layers.runtime import Runtime
from flaxen.models.balance import load_balancing
from flaxen.models.decoder import Decoder
from flaxen.models.fold import attentions_of
from flaxen.models.outputs import CausalOutput


def whole_context(
    decoder: Decoder,
    shape: tuple[int, ...],
    runtime: Runtime,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> Context:
    """The context of sequences that are given at once, (B, T).

    Positions count slots unless given, or what a table of positions counts. Packed documents are
    told apart by `segment_ids`, or, without a mask, by the places where given positions do not go
    on by one.
    """
    B, T = shape
    slots = jnp.arange(T, dtype=jnp.int32)
    keep = None if attention_mask is None else attention_mask.astype(bool)
    positions = jnp.broadcast_to(slots, (B, T)) if position_ids is None else position_ids
    if position_ids is None and decoder.embed_positions is not None:
        positions = decoder.embed_positions.counted(positions, keep)
    if segment_ids is None and position_ids is not None and attention_mask is None:
        jumps = jnp.diff(positions, axis=1) != 1
        segment_ids = jnp.pad(jnp.cumsum(jumps, axis=1), [(0, 0), (1, 0)])
    if _has(decoder, "chunk"):
        slots = chunk_slots(T, keep, segment_ids)
    scene = Scene(
        q_slots=slots,
        k_slots=slots,
        keep=keep,
        q_segments=segment_ids,
        k_segments=segment_ids,
        aligned=True,
    )
    return decoder.context(positions, scene, runtime, dropout_key=dropout_key)


def _has(decoder: Decoder, limit: str) -> bool:
    """Whether some layer's mask has a `window` or `chunk`."""
    found = (m.mask for m in walk(decoder) if isinstance(m, Attends))
    return any(getattr(mask, limit) for mask in found)


def _measures(decoder: Decoder) -> bool:
    """Whether some layer looks at how far tokens are apart: a window, a chunk, or ALiBi."""
    sloping = any(m.slopes for m in walk(decoder) if isinstance(m, Attends))
    return sloping or _has(decoder, "window") or _has(decoder, "chunk")


def shifted(labels: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Labels moved to the slot that predicts them; nothing is predicted past the end or across
    documents.
    """
    targets = jnp.pad(labels[:, 1:], [(0, 0), (0, 1)], constant_values=IGNORED)
    if segment_ids is None:
        return targets
    following = jnp.pad(segment_ids[:, 1:], [(0, 0), (0, 1)], constant_values=-1)
    return jnp.where(following == segment_ids, targets, IGNORED)


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions", "router_logits"))
def forward(
    decoder: Decoder,
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    labels: jax.Array | None = None,
    extra: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
    router_logits: bool | None = None,
) -> CausalOutput:
    """Whole sequences -> logits, and the mean loss over all targets if labels are given, with that
    of routers if their logits are asked for, or by the config.
    """
    ctx = whole_context(
        decoder, input_ids.shape, runtime, attention_mask, position_ids, segment_ids, dropout_key
    )
    balance, keep = decoder.balance, ctx.scene.keep
    asked = (balance is not None and balance.asked) if router_logits is None else router_logits
    with listening(asked) as scores:
        x, _, states = decoder.hidden(input_ids, ctx, None, hidden_states or attentions, extra)
    balance = balance if scores else None
    logits, loss = decoder.logits(x, runtime), None
    if labels is not None:
        targets = shifted(labels, ctx.scene.q_segments)
        logp = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        counts = targets != IGNORED
        loss = -jnp.where(counts, picked, 0).sum() / jnp.maximum(counts.sum(), 1)
        loss = loss if balance is None else loss + balance.weighed(scores, keep)
    return CausalOutput(
        logits=logits,
        loss=loss,
        hidden_states=states if hidden_states else None,
        attentions=attentions_of(decoder.layers, states, ctx) if attentions else None,
        aux_loss=None if balance is None else load_balancing(scores, balance.k, keep),
        router_logits=tuple(s.reshape(-1, s.shape[-1]) for s in scores) if asked else None,
    )


def objective(
    decoder: Decoder,
    ids: jax.Array,
    targets: jax.Array,
    ctx: Context,
    extra: jax.Array | None = None,
    keep: jax.Array | None = None,
    **terms: float,
) -> tuple[jax.Array, jax.Array]:
    """`Decoder.loss`; where the config asks for it, the loss of routers is in its mean. keep (B, T)
    is False for padding, as `ctx` says unless given; terms: as of `Decoder.loss`.
    """
    balance = decoder.balance
    with listening(balance is not None and balance.asked) as scores:
        total, count = decoder.loss(ids, targets, ctx, extra, **terms)
    if balance is None or not scores:
        return total, count
    keep = ctx.scene.keep if keep is None else keep
    return total + count * balance.weighed(scores, keep), count


@partial(jax.jit, static_argnames=("runtime",))
def mean_loss(
    decoder: Decoder,
    input_ids: jax.Array,
    labels: jax.Array,
    attention_mask: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    extra: jax.Array | None = None,
    *,
    runtime: Runtime,
) -> jax.Array:
    """The loss of `forward`; the (B, T, V) logits are never held at once."""
    ctx = whole_context(
        decoder, input_ids.shape, runtime, attention_mask, position_ids, segment_ids
    )
    targets = shifted(labels, ctx.scene.q_segments)
    total, count = objective(decoder, input_ids, targets, ctx, extra)
    return total / jnp.maximum(count, 1)


def extend(
    decoder: Decoder,
    ids: jax.Array,
    cache: Cache,
    valid: jax.Array,
    runtime: Runtime,
    *,
    fresh: bool = False,
    position_ids: jax.Array | None = None,
    extra: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Run new tokens on top of a cache -> hidden states (B, T, D) and the cache with them in it.

    ids (B, T); valid (B, T) is False for padding, which takes a slot but no position and is never
    seen; position_ids (B, T) stand in for counting. `fresh` says that the cache is empty: then the
    new tokens need only look at each other. In compiled code an overflow cannot raise; it turns the
    result into NaN instead of shifting silently.
    """
    cache, at = cache.advance(valid, runtime.placement if runtime.cache.sharded else None)
    new = jnp.arange(ids.shape[1], dtype=jnp.int32)
    if fresh:
        slots = chunk_slots(ids.shape[1], valid) if _has(decoder, "chunk") else new
        scene = Scene(q_slots=slots, k_slots=slots, keep=valid, aligned=True)
    elif _measures(decoder):
        # These count tokens: padding inside a row must not use them up.
        k_slots = jnp.cumsum(cache.keep, 1, dtype=jnp.int32) - 1
        scene = Scene(q_slots=at.positions, k_slots=k_slots, keep=cache.keep)
    else:
        k_slots = jnp.arange(cache.capacity, dtype=jnp.int32)
        scene = Scene(q_slots=at.slot + new, k_slots=k_slots, keep=cache.keep)
    counted = jnp.maximum(at.positions, 0) if position_ids is None else position_ids
    if position_ids is None and cache.shift is not None:
        counted = counted + cache.shift[:, None]
    ctx = decoder.context(counted, scene, runtime, at=at)
    x, layers, _ = decoder.hidden(ids, ctx, cache.layers, extra=extra)
    x = x if at.room is None else jnp.where(at.room, x, jnp.nan)
    return x, dataclasses.replace(cache, layers=layers)


def _forward_cached(
    decoder: Decoder,
    ids: jax.Array,
    cache: Cache,
    valid: jax.Array,
    position_ids: jax.Array | None = None,
    extra: jax.Array | None = None,
    *,
    runtime: Runtime,
) -> CausalOutput:
    """`extend`, with the logits of every new token."""
    x, cache = extend(decoder, ids, cache, valid, runtime, position_ids=position_ids, extra=extra)
    return CausalOutput(logits=decoder.logits(x, runtime), past_key_values=cache)


forward_cached = jax.jit(_forward_cached, static_argnames="runtime")
forward_in_place = jax.jit(_forward_cached, static_argnames="runtime", donate_argnames="cache")
"""The same, with the given cache used up: the new one takes its memory."""
