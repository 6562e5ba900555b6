"""Generation: one program reads the prompt, one writes all new tokens."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache import Cache, check_memory
from flaxen.core.errors import InputError
from flaxen.core.tree import module
from flaxen.generate.buckets import bucket
from flaxen.generate.prompt import Prompt, read_prompt
from flaxen.generate.sampling import Sampling, choose, ends, logprob
from flaxen.generate.settings import Settings, resolve
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import extend
from flaxen.models.decoder import Decoder
from flaxen.models.sight import Sight
from flaxen.models.skeleton import Skeleton, only_generating
from flaxen.models.switch import switch
from flaxen.shard import on_host


@module
class Step:
    """The newest token of each row, which the cache does not hold yet.

    token (B,): the pad id in rows that are finished; live (B,): it is a real one;
    open (B,): another one will follow;
    logprob (B,) float32; count: new tokens so far; seen (B, V): tokens that stood before.
    """

    token: jax.Array
    live: jax.Array
    open: jax.Array
    logprob: jax.Array
    count: jax.Array
    seen: jax.Array


def _next(logits: jax.Array, seen: jax.Array, live: jax.Array, count: Any, s: Sampling) -> Step:
    token = jnp.where(live, choose(logits, seen, count, s), s.pad)
    rows = jnp.arange(token.shape[0])
    return Step(
        token=token,
        live=live,
        open=live & ~ends(token, s),
        logprob=jnp.where(live, logprob(logits, token, s), 0),
        count=jnp.asarray(count + 1, jnp.int32),
        seen=seen.at[rows, token].max(live),
    )


@partial(jax.jit, static_argnames=("capacity", "runtime"))
def prefill(
    decoder: Decoder,
    cache: Cache | None,
    ids: jax.Array,
    valid: jax.Array,
    width: jax.Array,
    sight: Sight | None = None,
    *,
    capacity: int,
    runtime: Runtime,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Read a prompt, as `Prompt.laid` gives it, on top of a cache or of a new one.

    Gives the cache, scores of the first new tokens (B, V), and which tokens the prompt has (B, V).
    """
    B, T = ids.shape
    fresh = cache is None
    if cache is None:
        cache = decoder.init_cache(B, capacity, runtime=runtime)
    extra = None if sight is None else sight.embedding()
    positions = None if sight is None else sight.positions
    if sight is not None and positions is not None:
        positions = positions + cache.next_position[:, None]
        cache = cache.shifted(sight.shift)
    x, cache = extend(
        decoder, ids, cache, valid, runtime, fresh=fresh, position_ids=positions, extra=extra
    )
    # The slots after the prompt are free again: the next tokens are written over them.
    cache = dataclasses.replace(cache, index=cache.index - (T - width))
    last = jax.lax.dynamic_index_in_dim(x, width - 1, axis=1, keepdims=False)
    logits = decoder.logits(last, runtime)
    seen = jnp.zeros(logits.shape, bool).at[jnp.arange(B)[:, None], ids].max(valid)
    return cache, logits, seen


@jax.jit
def first(
    logits: jax.Array, seen: jax.Array, sampling: Sampling, after: Step | None = None
) -> Step:
    """The first new tokens, or those that follow `after`. Apart from `prefill`, as it is the same
    for prompts of all sizes.
    """
    if after is not None:
        return _next(logits, seen, after.open, after.count, sampling)
    return _next(logits, seen, jnp.ones(len(logits), bool), 0, sampling)


def _advance(
    decoder: Decoder, cache: Cache, step: Step, sampling: Sampling, runtime: Runtime
) -> tuple[Cache, Step]:
    x, cache = extend(decoder, step.token[:, None], cache, step.live[:, None], runtime)
    logits = decoder.logits(x[:, 0], runtime)
    return cache, _next(logits, step.seen, step.open, step.count, sampling)


advance = jax.jit(_advance, static_argnames=("runtime",), donate_argnames=("cache",))
"""Put the newest tokens into the cache and choose the next ones. The cache is written in place."""


@partial(jax.jit, static_argnames=("room", "runtime"), donate_argnames=("cache",))
def decode(
    decoder: Decoder, cache: Cache, step: Step, sampling: Sampling, *, room: int, runtime: Runtime
) -> tuple[Cache, jax.Array, jax.Array, Step]:
    """All other tokens in one loop, until each row has ended or `limit` is reached.

    Gives the cache, tokens and their log-probabilities (B, room), filled from the column of the
    given step on to that of the last one, and the last one.
    """
    put = lambda table, column, i: jax.lax.dynamic_update_slice_in_dim(
        table, column[:, None], i, axis=1
    )
    tokens = jnp.full((len(step.token), room), sampling.pad)
    logprobs = jnp.zeros(tokens.shape, jnp.float32)

    def body(carry: Any) -> Any:
        cache, step, tokens, logprobs = carry
        cache, new = _advance(decoder, cache, step, sampling, runtime)
        at = step.count
        return cache, new, put(tokens, new.token, at), put(logprobs, new.logprob, at)

    cache, step, tokens, logprobs = jax.lax.while_loop(
        lambda carry: carry[1].open.any() & (carry[1].count < sampling.limit),
        body,
        (
            cache,
            step,
            put(tokens, step.token, step.count - 1),
            put(logprobs, step.logprob, step.count - 1),
        ),
    )
    return cache, tokens, logprobs, step


def programs() -> int:
    """How many programs were compiled for generation so far."""
    compiled: tuple[Any, ...] = (prefill, first, advance, decode)
    return sum(f._cache_size() for f in compiled)


def begin(
    model: Any,
    prompt: Prompt,
    settings: Settings,
    sampling: Sampling,
    cache: Cache | None = None,
    after: Step | None = None,
) -> tuple[Cache, Step]:
    """A prompt's cache and first tokens, in sizes that other prompts share.

    A given cache must have room for all; `after` is the step whose token the prompt ends with.

    Raises:
        CacheError: a cache for all takes more memory than there is.
    """
    slots = bucket(int(prompt.lengths.max()))
    ids, mask, width = prompt.laid(slots)
    capacity = cache.capacity if cache is not None else slots + settings.room
    if cache is None:
        check_memory(model.module.cache_shapes(len(ids), capacity, runtime=model.runtime))
    place = {"capacity": capacity, "runtime": model.runtime}
    sight = prompt.laid_sight(slots)
    filled, *scores = prefill(model.module, cache, ids, mask, np.int32(width), sight, **place)
    return filled, first(*scores, sampling, after)


def pictured_prompt(
    model: Any, input_ids: Any, attention_mask: Any, settings: dict[str, Any]
) -> Prompt:
    """The prompt with its pictures, which are taken out of `settings`.

    Raises:
        InputError: as `read_prompt`; pictures for a model that takes none, or that do not fit.
    """
    module = model.module
    prompt = read_prompt(input_ids, attention_mask, module.embed_tokens.vocab_size)
    names = module.pictured() if isinstance(module, Skeleton) else ()
    if settings.get("pixel_values") is not None and not names:
        raise InputError(f"This model is {module.kind()}: it takes no pictures (pixel_values).")
    given = {name: settings.pop(name, None) for name in names}
    for name in ("mm_token_type_ids", "token_type_ids") if names else ():
        settings.pop(name, None)  # which the ids say themselves
    given = {name: x for name, x in given.items() if x is not None}
    if not given:
        return prompt
    if switch(module) is not None:
        raise InputError(
            "This model sees positions in another way past some length (LongRoPE); with pictures "
            "that is not supported."
        )
    seeing: Any = module
    sight, _ = seeing.see(prompt.ids, prompt.mask, given, model.runtime)
    return dataclasses.replace(prompt, sight=sight)


def stretches(decoder: Any, prompt: Prompt, limit: int) -> list[int]:
    """Numbers of new tokens at which to stop; between them, all is read anew, as every key is then
    another.
    """
    last = switch(decoder)
    room = 0 if last is None else last - int(prompt.lengths.max()) + 1
    return [room, limit] if 0 < room < limit else [limit]


def generate(
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    return_logprobs: bool = False,
    **settings: Any,
) -> Any:
    """Continue prompts -> ids (B, T + n) int32: the input as it was given, then n new columns.

    n is the number of steps until each row has ended, `max_new_tokens` at most; rows that ended
    earlier go on with the pad id. Settings have Hugging Face's names; see `settings.resolve`.
    With `return_logprobs`, a pair: ids, and the log-probability of each new token under the model's
    own distribution (B, n), 0 after a row's end.

    Raises:
        InputError: for prompts or settings that make no sense.
        CacheError: for more rows and tokens than there is memory for.
    """
    only_generating(model.module, "generate")
    prompt = pictured_prompt(model, input_ids, attention_mask, settings)
    asked = resolve(model, prompt.ids.shape[1], settings)
    sampling = asked.traced(model.runtime, logprobs=return_logprobs)
    ids, step, logprobs = prompt.ids, None, []
    for limit in stretches(model.module, prompt, asked.max_new_tokens):
        part = dataclasses.replace(sampling, limit=np.int32(limit))
        cache, step = jax.block_until_ready(begin(model, prompt, asked, part, after=step))
        start = int(step.count) - 1
        cache, *tables, step = decode(
            model.module, cache, step, part, room=asked.room, runtime=model.runtime
        )
        tokens, logp = (table[:, start : int(step.count)] for table in on_host(tables))
        ids, logprobs = np.hstack([ids, tokens]), [*logprobs, logp]
        if not on_host(step.open).any():
            break
        # The cache does not hold the newest tokens yet.
        real = on_host(cache.lengths) + on_host(step.live) - prompt.lengths
        prompt = prompt.longer(tokens, np.arange(tokens.shape[1]) < real[:, None])
    return (ids, np.hstack(logprobs)) if return_logprobs else ids
