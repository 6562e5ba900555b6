"""Linear attention whose memory fades: one decay for each head and token, computed in pieces.

A piece is a small table of what each token takes of each earlier one (arXiv 2405.21060); the state
goes from piece to piece. B batch, T tokens, L tokens of a piece, K key heads, G value heads of each
key head, S key channels, P value channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.layers.recurrence import in_pieces


def fading(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    state: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """state_t = exp(decay_t) state_{t-1} + v_t k_t and y_t = state_t q_t, the state beginning with
    zeros in each of the `documents` (B, T).

    q, k (B, T, K, S); v (B, T, K, G, P); decay (B, T, K, G), not above 0; state (B, K, G, P, S)
    before the first token, else zeros -> y as v, and the state after the last token.
    """
    B, _, K, S = k.shape
    if state is None:
        state = jnp.zeros((B, K, *v.shape[3:], S), v.dtype)

    def step(carry: Any, piece: Any) -> Any:
        state, document = carry
        q, k, v, decay, documents = piece
        fade = Fade(decay, documents, document)
        scores = jnp.einsum("BTKS,BLKS->BKTL", q, k)[:, :, None] * fade.table
        y = jnp.einsum("BKGTL,BLKGP->BTKGP", scores, v)
        y = y + fade.since[..., None] * jnp.einsum("BTKS,BKGPS->BTKGP", q, state)
        new = jnp.einsum("BLKGP,BLKS->BKGPS", v * fade.until[..., None], k)
        return (fade.whole[..., None, None] * state + new, fade.document), y

    (last, _), y = in_pieces(step, (state, first_document(documents)), (q, k, v, decay, documents))
    return y, last


def first_document(documents: jax.Array | None) -> jax.Array | None:
    return None if documents is None else documents[:, 0]


class Fade:
    """How much is left in a piece, (B, L, K, G) decays, of what: `table` (B, K, G, T, L) of token L
    at token T, `since` (B, T, K, G) of the state before the piece at T, `until` (B, L, K, G) of
    token L at the end, `whole` (B, K, G) of the state at the end. Nothing of other documents.
    """

    def __init__(self, decay: jax.Array, documents: jax.Array | None, before: jax.Array | None):
        total = jnp.cumsum(decay, 1)
        left = jnp.moveaxis(total[:, :, None] - total[:, None], (1, 2), (3, 4))
        see = jnp.tri(decay.shape[1], dtype=bool)
        last = total[:, -1:]
        since, until, whole = total, last - total, last[:, 0]
        self.document = None
        if documents is not None and before is not None:
            self.document = end = documents[:, -1]
            same = documents[:, :, None] == documents[:, None]
            see = (see & same)[:, None, None]
            since = _only(documents == before[:, None], since)
            until = _only(documents == end[:, None], until)
            whole = _only(before == end, whole)
        self.table = jnp.exp(jnp.where(see, left, -jnp.inf))
        self.since, self.until, self.whole = jnp.exp(since), jnp.exp(until), jnp.exp(whole)


def _only(where: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(where[..., None, None], x, -jnp.inf)
