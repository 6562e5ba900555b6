"""Answers of encoder-decoders: what is given is read once, the answer is said token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.cache import Cache, check_memory, empty
from flaxen.core.errors import InputError
from flaxen.core.tree import module
from flaxen.generate.buckets import bucket
from flaxen.generate.loop import Step
from flaxen.generate.prompt import read_prompt
from flaxen.generate.rules import NAMES, Rules, rules
from flaxen.generate.sampling import Sampling, choose, ends, logprob
from flaxen.generate.settings import resolve
from flaxen.layers.context import Memory
from flaxen.layers.runtime import Runtime
from flaxen.models.encoder_decoder import crossing
from flaxen.models.seq2seq import Seq2Seq
from flaxen.models.tower import TextEncoder
from flaxen.shard import on_host


@module
class Begun:
    """An answer that is begun: the cache holds its first tokens and the encoder's keys; keep (B, S)
    is False for padding of these; logits (B, P, V) are of the first tokens; seen (B, V): which
    these are.
    """

    cache: Cache
    keep: jax.Array | None
    logits: jax.Array
    seen: jax.Array


@partial(jax.jit, static_argnames="runtime")
def encode(
    model: Seq2Seq, source: jax.Array, keep: jax.Array | None, *, runtime: Runtime
) -> jax.Array:
    """What the encoder makes of its sequence: (B, S, D)."""
    return model.encoded(source, model.reading(source, keep, runtime))[0]


@partial(jax.jit, static_argnames=("room", "runtime"))
def begin(
    model: Seq2Seq,
    states: jax.Array,
    keep: jax.Array | None,
    start: jax.Array,
    *,
    room: int,
    runtime: Runtime,
) -> Begun:
    """Read the first tokens of an answer, (B, P), with room for `room` more."""
    B, P = start.shape
    cache = empty(model.cache_shapes(B, slots(P + room, runtime), runtime))
    cache, at = cache.advance(jnp.ones((B, P), bool), _placement(runtime))
    new = jnp.arange(P, dtype=jnp.int32)
    scene = Scene(q_slots=new, k_slots=new, aligned=True)
    memory = Memory(states=states, scene=crossing(P, states.shape[1], keep))
    x, layers, _ = model.said(start, model.saying(scene, memory, runtime, at), cache.layers)
    seen = jnp.zeros((B, model.embed_tokens.weight.shape[0]), bool)
    return Begun(
        cache=dataclasses.replace(cache, layers=layers),
        keep=keep,
        logits=model.logits(x, runtime),
        seen=seen.at[jnp.arange(B)[:, None], start].set(True),
    )


def slots(length: int, runtime: Runtime) -> int:
    """Slots of a cache for so many tokens: whole pages, if it has some."""
    page = runtime.cache.page_size if runtime.cache.layout == "paged" else 1
    return -(-length // page) * page


def _placement(runtime: Runtime) -> Any:
    return runtime.placement if runtime.cache.sharded else None


def _advance(
    model: Seq2Seq, cache: Cache, keep: Any, keys: int, token: Any, live: Any, runtime: Runtime
) -> tuple[Cache, jax.Array]:
    """The cache with one token (B,) more, and the scores of the next, (B, V)."""
    cache, at = cache.advance(live[:, None], _placement(runtime))
    scene = Scene(
        q_slots=at.slot[None],
        k_slots=jnp.arange(cache.capacity, dtype=jnp.int32),
        keep=cache.keep if cache.pages is None else None,
    )
    memory = Memory(states=None, scene=crossing(1, keys, keep))
    x, layers, _ = model.said(
        token[:, None], model.saying(scene, memory, runtime, at), cache.layers
    )
    return dataclasses.replace(cache, layers=layers), model.logits(x[:, 0], runtime)


@partial(jax.jit, static_argnames=("keys", "room", "runtime"))
def say(
    model: Seq2Seq,
    begun: Begun,
    sampling: Sampling,
    rule: Rules,
    more: Any = None,
    *,
    keys: int,
    room: int,
    runtime: Runtime,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All tokens of the answer in one loop: (B, room) tokens, their log-probabilities, and how many
    steps there were, until each row has ended or the limit is reached.

    keys: how many states the encoder made. more(logits, tokens, count) may change scores further.
    What is begun stays as it is.
    """
    B = begun.logits.shape[0]
    rows = jnp.arange(B)

    def following(logits: Any, seen: Any, live: Any, count: Any, tokens: Any) -> Step:
        scores = rule(logits.astype(jnp.float32), count, sampling.limit)
        # Where more is asked of tokens, they are compared with those that may come.
        of = logits if more is None else more(scores, tokens, count)
        scores = scores if more is None else of
        token = jnp.where(live, choose(scores, seen, count, sampling), sampling.pad)
        return Step(
            token=token,
            live=live,
            open=live & ~ends(token, sampling),
            logprob=jnp.where(live, logprob(of, token, sampling), 0),
            count=jnp.asarray(count + 1, jnp.int32),
            seen=seen.at[rows, token].max(live),
        )

    put = lambda table, column, i: jax.lax.dynamic_update_slice_in_dim(
        table, column[:, None], i, axis=1
    )
    tokens = jnp.full((B, room), sampling.pad)
    logprobs = jnp.zeros(tokens.shape, jnp.float32)
    first = following(begun.logits[:, -1], begun.seen, jnp.ones(B, bool), jnp.int32(0), tokens)

    def body(carry: Any) -> Any:
        cache, step, tokens, logprobs = carry
        cache, logits = _advance(model, cache, begun.keep, keys, step.token, step.live, runtime)
        new = following(logits, step.seen, step.open, step.count, tokens)
        at = step.count
        return cache, new, put(tokens, new.token, at), put(logprobs, new.logprob, at)

    _, step, tokens, logprobs = jax.lax.while_loop(
        lambda carry: carry[1].open.any() & (carry[1].count < sampling.limit),
        body,
        (begun.cache, first, put(tokens, first.token, 0), put(logprobs, first.logprob, 0)),
    )
    return tokens, logprobs, step.count


def answer(
    model: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    *,
    input_features: Any = None,
    decoder_input_ids: Any = None,
    decoder_start_token_id: int | None = None,
    return_logprobs: bool = False,
    **settings: Any,
) -> Any:
    """What an encoder-decoder says to token ids (B, S), or to a spectrogram: (B, P + n) int32, its
    first tokens, then n new ones.

    The first token is `decoder_start_token_id`, unless decoder_input_ids (P,) or (B, P) say more.
    Settings are those of `generate`, and suppress_tokens, begin_suppress_tokens,
    forced_bos_token_id, forced_eos_token_id; what is not given comes from the checkpoint.

    Raises:
        InputError: for inputs or settings that make no sense.
        CacheError: for more than there is memory for.
    """
    source, keep = given(model, input_ids, attention_mask, input_features)
    start = first_tokens(model, len(source), decoder_input_ids, decoder_start_token_id)
    mine = {name: settings.pop(name) for name in NAMES if name in settings}
    asked = resolve(model, start.shape[1], settings)
    fits(model.module, start.shape[1], asked.max_new_tokens)
    runtime, vocab = model.runtime, model.module.embed_tokens.weight.shape[0]
    states = encode(model.module, source, keep, runtime=runtime)
    shapes = model.module.cache_shapes(
        len(source), slots(start.shape[1] + asked.room, runtime), runtime
    )
    check_memory(shapes)
    begun = begin(model.module, states, keep, start, room=asked.room, runtime=runtime)
    tokens, logprobs, count = on_host(
        say(
            model.module,
            begun,
            asked.traced(runtime, logprobs=return_logprobs),
            rules(vocab, mine, stored(model), runtime.placement),
            keys=states.shape[1],
            room=asked.room,
            runtime=runtime,
        )
    )
    ids = np.hstack([start, tokens[:, : int(count)]])
    return (ids, logprobs[:, : int(count)]) if return_logprobs else ids


def given(model: Any, ids: Any, mask: Any, features: Any) -> tuple[Any, Any]:
    """The encoder's sequence, and which of it is real; ids in sizes that other inputs share.

    Raises:
        InputError: for what this model does not read.
    """
    encoder, table = model.module.encoder, model.module.embed_tokens
    name = encoder.inputs[0]
    read, other = (ids, features) if name == "input_ids" else (features, ids)
    if read is None or other is not None:
        raise InputError(f"This model reads {name}; give these alone.")
    if not isinstance(encoder, TextEncoder):
        return encoder.checked(table, {name: features})
    prompt = read_prompt(ids, mask, table.vocab_size)
    length = prompt.ids.shape[1]
    encoder.check_length(name, length)
    most = encoder.longest()
    wide = bucket(length) if most is None else min(bucket(length), most)
    after = [(0, 0), (0, wide - length)]
    return np.pad(np.where(prompt.mask, prompt.ids, 0), after), np.pad(prompt.mask, after)


def first_tokens(model: Any, rows: int, ids: Any, start: int | None) -> np.ndarray:
    """How each answer begins: (B, P) int32.

    Raises:
        InputError: for tokens that are none, or where nothing says them.
    """
    if ids is not None:
        table = read_prompt(ids, None, model.module.embed_tokens.vocab_size).ids
        if len(table) not in (1, rows):
            raise InputError(f"decoder_input_ids have {len(table)} rows for {rows}; give as many.")
        return np.broadcast_to(table, (rows, table.shape[1])).astype(np.int32)
    found = [start, stored(model).get("decoder_start_token_id"), stored(model).get("bos_token_id")]
    found = [x for x in found if x is not None]
    if not found:
        raise InputError(
            "Nothing says how an answer begins: give decoder_start_token_id, or write it into "
            "config.json."
        )
    return first_tokens(model, rows, [[found[0]]], None)


def stored(model: Any) -> Mapping[str, Any]:
    """What the checkpoint says of generation: its generation config over its config."""
    names = (*NAMES, "decoder_start_token_id", "bos_token_id")
    config = {name: getattr(model.config, name, None) for name in names}
    ours = {k: v for k, v in (model.generation_config or {}).items() if v is not None}
    return config | ours


def fits(decoder: Seq2Seq, begun: int, new: int) -> None:
    """
    Raises:
        InputError: for a longer answer than the model has positions for.
    """
    most = decoder.longest()
    # The last token is not looked at again.
    if most is not None and begun + new - 1 > most:
        raise InputError(
            f"The answer begins with {begun} tokens and may have {new} more; this model has "
            f"positions for {most}. Pass max_new_tokens={most + 1 - begun} or less."
        )
