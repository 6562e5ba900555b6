"""Timestamps among Whisper's tokens: how they may stand, and what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module

STEP = 0.02
"""Seconds from one timestamp to the next."""


@module
class TimestampRule:
    """Timestamps come in pairs, never fall, and one comes first; where they are together likelier
    than any word, one of them comes.

    begin: the token of 0.00 s, and all after it are timestamps; end: that which ends a text;
    latest: how many steps after 0.00 s the first may stand.
    """

    begin: jax.Array
    end: jax.Array
    latest: jax.Array

    def __call__(self, logits: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
        """Scores (B, V) of what follows `count` of tokens (B, room); -inf for what may not."""
        ids, slots = jnp.arange(logits.shape[-1]), jnp.arange(tokens.shape[1])
        is_time, before = ids >= self.begin, slots < count
        column = lambda back: jnp.take(tokens, jnp.maximum(count - back, 0), axis=1)
        after_time = (count >= 1) & (column(1) >= self.begin)
        after_two = (count < 2) | (column(2) >= self.begin)
        paired, opened = (after_time & after_two)[:, None], (after_time & ~after_two)[:, None]
        said = jnp.where(before & (tokens >= self.begin), tokens, -1).max(1)
        # A segment may begin where the last one ended, but not last no time at all.
        least = jnp.where(said < 0, self.begin, said + jnp.where(opened[:, 0], 0, 1))
        first = (count == 0) & (~is_time | (ids > self.begin + self.latest))
        out = (ids == self.begin - 1) | first
        out = out | (paired & is_time) | (opened & (ids < self.end))
        out = out | (is_time & (ids < least[:, None]))
        logits = jnp.where(out, -jnp.inf, logits)
        together = jax.nn.logsumexp(jnp.where(is_time, logits, -jnp.inf), -1, keepdims=True)
        likeliest = jnp.where(is_time, -jnp.inf, logits).max(-1, keepdims=True)
        return jnp.where((together > likeliest) & ~is_time, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What was said between two times, in seconds from the window's beginning."""

    start: float
    end: float
    tokens: list[int]


def pieces(tokens: list[int], begin: int, seconds: float) -> tuple[list[Piece], float]:
    """The pieces of what was said in a window that lasts so many seconds, and after how many of
    them the next window begins: where the last piece ends that is known to be whole.
    """
    times = [token >= begin for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    at = lambda token: (token - begin) * STEP
    if not cuts:
        last = [token for token in tokens if token > begin]
        return [Piece(0.0, at(last[-1]) if last else seconds, tokens)] if tokens else [], seconds
    closed = times[-2:] == [False, True]
    ends = [*cuts, len(tokens)] if closed else cuts
    starts = [0, *ends[:-1]]
    found = [
        Piece(at(tokens[a]), at(tokens[b - 1]), tokens[a:b])
        for a, b in zip(starts, ends, strict=True)
    ]
    return found, seconds if closed else at(tokens[ends[-1] - 1])


def rule(begin: int, end: int, latest: Any) -> TimestampRule:
    """A rule of numbers; latest: None if any."""
    steps = 2**30 if latest is None else int(latest)
    return TimestampRule(begin=jnp.int32(begin), end=jnp.int32(end), latest=jnp.int32(steps))
