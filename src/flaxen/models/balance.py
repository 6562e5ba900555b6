"""Losses of routers: that no expert is left without tokens, and that scores stay small."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RouterLoss:
    """What is added to a model's loss for its routers, which choose `k` experts.

    coef and z_coef: of `load_balancing` and `z_loss`; asked: whether the config asks for it in
    every call (`output_router_logits`).
    """

    k: int
    coef: float
    z_coef: float = 0.0
    asked: bool = False

    def weighed(self, scores: Sequence[jax.Array], keep: jax.Array | None) -> jax.Array:
        """The sum of both, times their coefficients."""
        loss = self.coef * load_balancing(scores, self.k, keep)
        return loss + self.z_coef * z_loss(scores, keep) if self.z_coef else loss


def load_balancing(scores: Sequence[jax.Array], k: int, keep: jax.Array | None) -> jax.Array:
    """E times the sum over experts of the share of tokens that choose one, times its mean
    probability (Switch Transformers, arXiv 2101.03961, equations 4 to 6, for k experts of a token).

    scores: one (B, T, E) for each layer, over all of which shares and means are taken; the `k`
    largest count as chosen, whatever else a router heeds. keep (B, T) is False for padding.
    """
    zero = jnp.zeros(())
    count, chosen, likely = zero, zero, zero
    for each in scores:
        probabilities = jax.nn.softmax(each)
        best = jax.lax.top_k(probabilities, k)[1]
        taken = jax.nn.one_hot(best, each.shape[-1], dtype=each.dtype).sum(-2)
        weight = _weights(each, keep)
        chosen += jnp.einsum("bte,bt->e", taken, weight)
        likely += jnp.einsum("bte,bt->e", probabilities, weight)
        count += weight.sum()
    return scores[0].shape[-1] * (chosen * likely).sum() / jnp.maximum(count, 1) ** 2


def z_loss(scores: Sequence[jax.Array], keep: jax.Array | None) -> jax.Array:
    """Mean over tokens and layers of the squared log of the sum of exponentials (ST-MoE,
    arXiv 2202.08906, equation 5). Arguments as of `load_balancing`.
    """
    each = [(jax.nn.logsumexp(s, -1) ** 2, _weights(s, keep)) for s in scores]
    total = sum((weight.sum() for _, weight in each), jnp.zeros(()))
    return sum((z * weight).sum() for z, weight in each) / jnp.maximum(total, 1)


def _weights(scores: jax.Array, keep: jax.Array | None) -> jax.Array:
    return jnp.ones(scores.shape[:-1], scores.dtype) if keep is None else keep.astype(scores.dtype)
