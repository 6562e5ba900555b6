"""Next-token loss straight from hidden states, never holding the logits of all rows at once.

V vocab, R rows of one chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.dot import arithmetic, dense, dot
from flaxen.layers.row_shards import WHOLE, RowShards, row_shards
from flaxen.shard import Placement

IGNORED = -100


class Scoring(NamedTuple):
    """How scores are made of states x (R, embed...) and a head (weight, bias): `softcap *
    tanh(scale * (x . weight + bias) / softcap)`, in float32 at least; -inf from the column `vocab`
    on, as those belong to no token.
    """

    contract: int = 1
    softcap: float | None = None
    scale: float = 1.0
    vocab: int | None = None

    def __call__(self, x: jax.Array, head: Any) -> jax.Array:
        """(R, V)."""
        return _cap(self, _product(self, x, head))


class Costs(NamedTuple):
    """How scores are made, and what a row of them costs; see `linear_cross_entropy`."""

    scoring: Scoring
    label_smoothing: float
    z_loss: float


def widened(x: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
    """Both in the dtype that is multiplied in: once for all chunks, so that neither the weight nor
    its gradient is converted in each. A leaf type stays as it is.
    """
    if not isinstance(weight, jax.Array | np.ndarray):
        return x, weight
    wide = jnp.promote_types(x.dtype, arithmetic(x.dtype))
    return x.astype(wide), jnp.asarray(weight, wide)


def linear_cross_entropy(
    x: jax.Array,
    weight: Any,
    labels: jax.Array,
    *,
    bias: Any = None,
    contract: int = 1,
    softcap: float | None = None,
    scale: float = 1.0,
    vocab: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = 256,
    placement: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum of the negative log-likelihoods in float32, and how many rows were counted.

    x: (rows..., embed...), weight: (vocab, embed...) or a leaf type, bias: (vocab,) or None,
    labels: (rows...), -100 ignored; rows are (batch, seq) or (batch,). Logits are `softcap *
    tanh(scale * (x . weight + bias) / softcap)`, `chunk` rows at a time; those from `vocab` on
    belong to no token and count for nothing.
    label_smoothing e: a target has probability 1 - e, and e is shared by all tokens alike; z_loss z
    adds z times the square of the logarithm of the softmax's sum, for each row that counts.
    Gradients are computed in the forward pass, while the logits are there.

    With a placement each device takes `chunk` of its own rows at a time. It holds the weight and,
    in float32, the sum of its own gradients of it, both whole but for a cut of the vocabulary: so
    the one is gathered and the other summed up over devices once, not in each chunk.
    """
    count = jnp.sum(labels != IGNORED)
    x, weight = widened(x, weight)
    shards = row_shards(placement, labels.shape)
    x, labels = shards.pieces(x, chunk), shards.pieces(labels, chunk, IGNORED)
    how = Costs(Scoring(contract, softcap, scale, vocab), label_smoothing, z_loss)
    return _nll(shards, how, x, (weight, bias), labels), count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _nll(shards: RowShards, how: Costs, x: jax.Array, head: Any, labels: jax.Array) -> jax.Array:
    def step(head: Any, total: jax.Array, rows: Any) -> Any:
        logits = how.scoring(rows[0], head)
        return total + _terms(how, logits, rows[1])[0], None

    def own(rows: Any, head: Any) -> Any:
        start = jnp.zeros((), jnp.float32)
        return None, jax.lax.scan(functools.partial(step, head), start, rows)[0]

    return shards.run(own, (x, labels), head)[1]


def _nll_fwd(shards: RowShards, how: Costs, x: jax.Array, head: Any, labels: jax.Array) -> Any:
    def step(head: Any, carry: Any, rows: Any) -> Any:
        raw, pull = jax.vjp(functools.partial(_product, how.scoring), rows[0], head)
        logits, uncap = jax.vjp(functools.partial(_cap, how.scoring), raw)
        nll, slope = _terms(how, logits, rows[1])
        dx, dhead = pull(*uncap(slope))
        total, sums = carry
        return (total + nll, jax.tree.map(added, sums, dhead)), dx

    def own(rows: Any, head: Any) -> Any:
        start = jnp.zeros((), jnp.float32), jax.tree.map(zeros_for, head)
        sums, dx = jax.lax.scan(functools.partial(step, head), start, rows)
        return dx, sums

    dx, (total, dhead) = shards.run(own, (x, labels), head, (WHOLE, shards.stored(head)))
    return total, (dx, dhead, head)


def _nll_bwd(shards: RowShards, how: Costs, kept: Any, grad: jax.Array) -> Any:
    dx, dhead, head = kept
    dhead = jax.tree.map(lambda d, w: as_leaf(d * grad, w), dhead, head)
    return (dx * grad).astype(dx.dtype), dhead, None


_nll.defvjp(_nll_fwd, _nll_bwd)


def _product(how: Scoring, x: jax.Array, head: Any) -> jax.Array:
    weight, bias = head
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(weight, jax.Array | np.ndarray):
        y = dense(x, weight, how.contract, wide)
    else:
        y = dot(x, weight, how.contract).astype(wide)
    return y if bias is None else y + bias.astype(wide)


def _cap(how: Scoring, logits: jax.Array) -> jax.Array:
    _, softcap, scale, vocab = how
    logits = logits * scale
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    return logits if vocab is None else only_tokens(logits, vocab)


def only_tokens(logits: jax.Array, vocab: int) -> jax.Array:
    """Logits (..., V) with -inf from the column `vocab` on."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


def _terms(how: Costs, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The summed loss of (R, V) logits, and its slope in each of them."""
    _, smoothing, z_loss = how
    counted = labels != IGNORED
    top = jnp.max(logits, axis=-1, keepdims=True)
    exps = jnp.exp(logits - top)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    label = jnp.where(counted, labels, 0)[:, None]
    chosen = jnp.take_along_axis(logits, label, axis=-1)
    whole = jnp.log(total) + top
    loss, slope = whole - chosen, exps / total
    hit = (jnp.arange(logits.shape[-1]) == label).astype(slope.dtype)
    if smoothing:
        real = jnp.isfinite(logits)
        even = real / jnp.sum(real, axis=-1, keepdims=True)
        mean = jnp.sum(jnp.where(real, logits * even, 0), axis=-1, keepdims=True)
        loss = loss + smoothing * (chosen - mean)
        hit = (1 - smoothing) * hit + smoothing * even
    if z_loss:
        loss, slope = loss + z_loss * whole**2, slope * (1 + 2 * z_loss * whole)
    slope = jnp.where(counted[:, None], slope - hit, 0)
    return jnp.sum(jnp.where(counted[:, None], loss, 0)).astype(jnp.float32), slope


def zeros_for(leaf: jax.Array) -> jax.Array:
    """Where the gradient of a leaf is summed: in float32 at least."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros((), jnp.float32)
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def added(total: jax.Array, part: jax.Array) -> jax.Array:
    """With one more part of the gradient; integers have none."""
    return total if part.dtype == jax.dtypes.float0 else total + part.astype(total.dtype)


def as_leaf(total: jax.Array, leaf: jax.Array) -> Any:
    """The gradient that was summed up, as the leaf's own."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return total.astype(leaf.dtype)
