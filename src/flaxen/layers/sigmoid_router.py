"""LFM 2's router: experts compete by sigmoids, shifted by a bias that is no part of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import buffer, module, param, static, zeros_param
from flaxen.layers.routers import Router


@module
class BiasedSigmoidRouter(Router):
    """Sigmoids of all experts' scores; the `k` largest after `expert_bias` (experts,), if there is
    one, is added. A token's weights are the sigmoids, times `scale`.
    """

    expert_bias: buffer[Any] = None
    scale: static[float]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = jax.nn.sigmoid(self.logits(x))
        bias = self.expert_bias
        ranks = shares if bias is None else shares + bias.astype(shares.dtype)
        chosen = jax.lax.top_k(ranks, self.k)[1]
        return self.weighed(jnp.take_along_axis(shares, chosen, -1)) * self.scale, chosen

    def weighed(self, shares: jax.Array) -> jax.Array:
        """The chosen sigmoids as weights, (B, T, k)."""
        return shares


@module
class NormalisedBiasedSigmoidRouter(BiasedSigmoidRouter):
    """The same; a token's weights are scaled to sum to one before `scale`."""

    def weighed(self, shares: jax.Array) -> jax.Array:
        # The epsilon is the reference's, which has no setting for it.
        return shares / (shares.sum(-1, keepdims=True) + 1e-6)


def sigmoid_router(
    embed: int, experts: int, k: int, *, biased: bool, normalised: bool, scale: float
) -> BiasedSigmoidRouter:
    """Which of the two, by size."""
    return (NormalisedBiasedSigmoidRouter if normalised else BiasedSigmoidRouter)(
        weight=param(experts=experts, embed=embed),
        k=k,
        expert_bias=zeros_param(experts=experts) if biased else None,
        scale=scale,
    )
