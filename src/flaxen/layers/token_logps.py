"""Log-probabilities of tokens straight from hidden states, never holding the scores of all rows.

V vocab, R rows of one chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.layers.cross_entropy import IGNORED, Scoring, widened
from flaxen.layers.row_chunks import in_chunks
from flaxen.layers.row_shards import row_shards
from flaxen.shard import Placement

PLAIN = Scoring()


def token_logps(
    x: jax.Array,
    weight: Any,
    targets: jax.Array,
    *,
    bias: Any = None,
    scoring: Scoring = PLAIN,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = 256,
    placement: Placement | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """log p of each row's target, and if asked the entropy of each row's distribution in nats:
    (rows...) in float32, 0 where the target is -100.

    x: (rows..., embed...), weight: (vocab, embed...) or a leaf type, bias: (vocab,) or None,
    targets: (rows...); rows are (batch, seq) or (batch,). Scores are those of `scoring`, divided by
    `temperature`; `chunk` rows are scored at a time, and once more in the backward pass. placement:
    as of `linear_cross_entropy`.
    """
    x, weight = widened(x, weight)
    function = functools.partial(_picked, scoring, temperature, entropy)
    shards = row_shards(placement, targets.shape)
    logps, *entropies = in_chunks(function, x, (weight, bias), targets, shards=shards, chunk=chunk)
    return logps, entropies[0] if entropy else None


def log_softmax(logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """(..., V) -> log p in float32 at least; where scores are -inf, the lowest float, so that its
    product with p = 0 is 0.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logps = jax.nn.log_softmax(wide / temperature)
    return jnp.where(jnp.isneginf(logps), jnp.finfo(logps.dtype).min, logps)


def _picked(
    scoring: Scoring,
    temperature: float,
    entropy: bool,
    x: jax.Array,
    head: Any,
    targets: jax.Array,
    _: Any,
) -> tuple[jax.Array, ...]:
    """(R,) each."""
    logps = log_softmax(scoring(x, head), temperature)
    counted = targets != IGNORED
    label = jnp.where(counted, targets, 0)[:, None]
    chosen = jnp.take_along_axis(logps, label, axis=-1)[:, 0]
    found = (chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1)) if entropy else (chosen,)
    return tuple(jnp.where(counted, y, 0).astype(jnp.float32) for y in found)
