"""From scores to a token. All settings are traced numbers: others meet the same program.

What a setting leaves off is not computed: greedy decoding costs an argmax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.core.tree import module


@module
class Sampling:
    """Settings as arrays; all are scalars but `eos`, which is filled up with -1.

    Off is: top_k 0, top_p 1, min_p 0, repetition_penalty 1, min_new_tokens 0. `limit` is the number
    of new tokens.
    """

    sample: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    min_new_tokens: jax.Array
    limit: jax.Array
    logprobs: jax.Array
    eos: jax.Array
    pad: jax.Array
    key: jax.Array


def ends(token: jax.Array, s: Sampling) -> jax.Array:
    """(B,) -> (B,): whether a token is one of those that end a row."""
    return (token[:, None] == s.eos).any(-1)


def choose(logits: jax.Array, seen: jax.Array, count: jax.Array, s: Sampling) -> jax.Array:
    """The next token of each row.

    logits (B, V); seen (B, V): tokens that stood before; count: new tokens so far.

    The same key, count and scores give the same token.
    """
    x = logits.astype(jnp.float32)
    x = jax.lax.cond(s.repetition_penalty != 1, _penalised, lambda x, *_: x, x, seen, s)
    x = jax.lax.cond(count < s.min_new_tokens, _unending, lambda x, _: x, x, s)
    draw = lambda x: jax.random.categorical(jax.random.fold_in(s.key, count), warped(x, s))
    token = jax.lax.cond(s.sample, draw, lambda x: jnp.argmax(x, -1), x)
    return token.astype(jnp.int32)


def logprob(logits: jax.Array, token: jax.Array, s: Sampling) -> jax.Array:
    """log p of the chosen tokens (B,) under the model's own distribution; 0 unless asked for."""

    def compute(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        return jnp.take_along_axis(logp, token[:, None], -1)[:, 0]

    nothing = jnp.zeros(token.shape, jnp.float32)
    return jax.lax.cond(s.logprobs, compute, lambda _: nothing, logits)


def warped(x: jax.Array, s: Sampling) -> jax.Array:
    """Scores to draw from, -inf for tokens that are out.

    In this order: temperature, top-k, top-p, min-p.
    """
    x = x.astype(jnp.float32)
    # From the highest on, and never by 0 in float32: the coldest temperatures are greedy.
    x = (x - x.max(-1, keepdims=True)) / jnp.maximum(s.temperature, 1e-30)
    x = jax.lax.cond(s.top_k > 0, _top_k, lambda x, _: x, x, s.top_k)
    x = jax.lax.cond(s.top_p < 1, _top_p, lambda x, _: x, x, s.top_p)
    return jax.lax.cond(s.min_p > 0, _min_p, lambda x, _: x, x, s.min_p)


def kept(logits: jax.Array, s: Sampling) -> jax.Array:
    """(B, V): which tokens may be drawn."""
    return warped(logits, s) > -jnp.inf


def _penalised(x: jax.Array, seen: jax.Array, s: Sampling) -> jax.Array:
    """Less of what was there already (CTRL, arXiv 1909.05858)."""
    p = s.repetition_penalty
    return jnp.where(seen, jnp.where(x < 0, x * p, x / p), x)


def _unending(x: jax.Array, s: Sampling) -> jax.Array:
    where = jnp.where(s.eos < 0, x.shape[1], s.eos)
    return x.at[:, where].set(-jnp.inf, mode="drop")


def _top_k(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k highest, and those equal to the last of them."""
    ranks = _ordered(x)
    return jnp.where(ranks >= _threshold(ranks, jnp.ones_like(x), k), x, -jnp.inf)


def _top_p(x: jax.Array, p: jax.Array) -> jax.Array:
    """The fewest of the highest whose probabilities reach p, the one that reaches it included.

    Sums within the rounding of float32 count as reached. Of equal scores the first come first.
    """
    p, ranks, probs = p * (1 - 2e-6), _ordered(x), jax.nn.softmax(x, -1)
    last = _threshold(ranks, probs, p)
    equal = ranks == last
    above = jnp.where(ranks > last, probs, 0).sum(-1, keepdims=True)
    before = above + (jnp.cumsum(equal, -1) - 1) * probs
    return jnp.where((ranks > last) | (equal & (before < p)), x, -jnp.inf)


def _min_p(x: jax.Array, p: jax.Array) -> jax.Array:
    """Those at least p times as likely as the likeliest."""
    return jnp.where(x >= x.max(-1, keepdims=True) + jnp.log(p), x, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(ranks: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The lowest rank (B, 1) above which the weights sum to less than `limit`.

    Halving the range 32 times is exact, and on a CPU some 50 times faster than sorting a
    vocabulary.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        enough = jnp.where(ranks > middle, weights, 0).sum(-1, keepdims=True) < limit
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    below, top = ranks.min(-1, keepdims=True) - 1, ranks.max(-1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, (below, top))[1]
