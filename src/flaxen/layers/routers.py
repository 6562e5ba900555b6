"""Which experts a token goes through, and with what weights. Scores are float32.

Letters: B batch, T tokens, E experts, k experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot
from flaxen.core.errors import ConfigError
from flaxen.core.tree import buffer, module, param, static
from flaxen.layers.listening import tell


@module
class Router:
    """Softmax over all experts; the `k` largest are a token's weights."""

    weight: Any
    k: static[int]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x (B, T, D) -> weights (B, T, k) float32 and which experts, (B, T, k)."""
        return jax.lax.top_k(jax.nn.softmax(self.logits(x)), self.k)

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of all experts, (B, T, E), which who listens is told."""
        scores = self.scores(x)
        tell(scores)
        return scores

    def scores(self, x: jax.Array) -> jax.Array:
        return dot(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self.weight)

    def check(self) -> None:
        """Of an abstract router: whether there is such a choice.

        Raises:
            ConfigError: naming the keys of a config that ask for another one.
        """
        experts = self.weight.axes["experts"]
        if not 1 <= self.k <= experts:
            raise ConfigError(
                f"num_experts_per_tok (moe_k or moe_topk in some configs) is {self.k} and there "
                f"are {experts} experts; expected from 1 to {experts}. Lower it, or correct the "
                "number of experts."
            )


@module
class NormalisedRouter(Router):
    """The same; a token's weights are scaled to sum to one."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, chosen = Router.__call__(self, x)
        return weights / weights.sum(-1, keepdims=True), chosen


@module
class RouterOfChosen(Router):
    """The `k` largest scores; softmax over these alone (GPT-OSS, Granite). bias: (E,) or None."""

    bias: Any = None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, chosen = jax.lax.top_k(self.logits(x), self.k)
        return jax.nn.softmax(best), chosen

    def scores(self, x: jax.Array) -> jax.Array:
        scores = Router.scores(self, x)
        return scores if self.bias is None else scores + self.bias.astype(scores.dtype)


@module
class SigmoidRouter(Router):
    """The `k` largest scores, each weighed by its own sigmoid (Llama 4)."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, chosen = jax.lax.top_k(self.logits(x), self.k)
        return jax.nn.sigmoid(best), chosen


@module
class GroupedRouter(Router):
    """Softmax over all experts; only those of the `best` of `groups` count, by each group's largest
    (DeepSeek-V2). Weights are times `scale`.
    """

    groups: static[int]
    best: static[int]
    scale: static[float]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.softmax(self.logits(x))
        left = _of_best_groups(scores, self.groups, self.best, 1, 0.0)
        weights, chosen = jax.lax.top_k(left, self.k)
        return weights * self.scale, chosen

    def check(self) -> None:
        Router.check(self)
        _check_groups(self, 1)


@module
class CorrectedRouter(Router):
    """Sigmoids; chosen by these plus a correction that is no part of the weights, among the `best`
    of `groups`, by the sum of each group's two largest (DeepSeek-V3). Weights are times `scale`.
    """

    e_score_correction_bias: buffer[Any]
    groups: static[int]
    best: static[int]
    scale: static[float]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.sigmoid(self.logits(x))
        ranked = scores + self.e_score_correction_bias.astype(scores.dtype)
        left = _of_best_groups(ranked, self.groups, self.best, 2, -jnp.inf)
        chosen = jax.lax.top_k(left, self.k)[1]
        return self.shares(jnp.take_along_axis(scores, chosen, -1)) * self.scale, chosen

    def shares(self, weights: jax.Array) -> jax.Array:
        """The chosen scores as weights, (B, T, k)."""
        return weights

    def check(self) -> None:
        Router.check(self)
        _check_groups(self, 2)


@module
class NormalisedCorrectedRouter(CorrectedRouter):
    """The same; a token's weights are scaled to sum to one before `scale`."""

    def shares(self, weights: jax.Array) -> jax.Array:
        return weights / (weights.sum(-1, keepdims=True) + 1e-20)


@module
class CorrectedSoftmaxRouter(Router):
    """Softmax over all experts; chosen by that plus a correction that is no part of the weights,
    which are scaled to sum to one, or less where they sum to less than `least` (ERNIE).
    """

    e_score_correction_bias: buffer[Any]
    least: static[float]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.softmax(self.logits(x))
        ranked = scores + self.e_score_correction_bias.astype(scores.dtype)
        chosen = jax.lax.top_k(ranked, self.k)[1]
        weights = jnp.take_along_axis(scores, chosen, -1)
        return weights / jnp.maximum(weights.sum(-1, keepdims=True), self.least), chosen


@module
class SparseMixer(Router):
    """One expert after another: each is the largest of those that are left, weighed by a softmax
    over those that are not much smaller (SparseMixer, arXiv 2409.12136, as it runs outside of
    training). jitter: how much smaller, as a share of two.
    """

    jitter: static[float]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = self.logits(x)
        left, weights, chosen = scores, [], []
        for _ in range(self.k):
            best = jax.lax.stop_gradient(left.max(-1, keepdims=True))
            pick = jnp.argmax(left, -1, keepdims=True)
            near = (best - scores) / jnp.maximum(jnp.abs(scores), best) <= 2 * self.jitter
            shares = jax.nn.softmax(jnp.where(near, left, -jnp.inf))
            weights.append(jnp.take_along_axis(shares, pick, -1))
            chosen.append(pick)
            left = jnp.where(jnp.arange(scores.shape[-1]) == pick, -jnp.inf, left)
        return jnp.concatenate(weights, -1), jnp.concatenate(chosen, -1)


def _of_best_groups(
    scores: jax.Array, groups: int, best: int, by: int, instead: float
) -> jax.Array:
    """Scores (..., E) with `instead` outside of the `best` groups, by the sum of each group's `by`
    largest.
    """
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    ranks = jax.lax.top_k(grouped, by)[0].sum(-1)
    chosen = jax.lax.top_k(ranks, best)[1]
    keep = (chosen[..., None] == jnp.arange(groups)).any(-2)
    return jnp.where(keep[..., None], grouped, instead).reshape(scores.shape)


def _check_groups(router: GroupedRouter | CorrectedRouter, by: int) -> None:
    """
    Raises:
        ConfigError: groups that are not of equal size, or hold too few experts to choose from.
    """
    experts, groups, best = router.weight.axes["experts"], router.groups, router.best
    if groups < 1 or experts % groups:
        raise ConfigError(
            f"n_group is {groups}, which does not share {experts} experts evenly; expected a "
            f"divisor of {experts}. Correct it, or the number of experts."
        )
    if not 1 <= best <= groups:
        raise ConfigError(
            f"topk_group is {best} and n_group is {groups}; expected topk_group from 1 to "
            f"{groups}. Lower it, or raise n_group."
        )
    each = experts // groups
    if each < by or router.k > best * each:
        raise ConfigError(
            f"n_group={groups} leaves {each} experts in a group and topk_group={best} leaves "
            f"{best * each} to choose from; expected {by} or more in a group, and as many to "
            f"choose from as num_experts_per_tok={router.k}. Lower n_group or raise topk_group."
        )


def router(embed: int, experts: int, k: int, *, normalised: bool) -> Router:
    """Which of the two plain routers, by size."""
    kind = NormalisedRouter if normalised else Router
    return kind(weight=param(experts=experts, embed=embed), k=k)


def routed(kind: type[Router], embed: int, experts: int, k: int, **slots: Any) -> Any:
    """A router of a kind, by size; `slots` are its other fields."""
    return kind(weight=param(experts=experts, embed=embed), k=k, **slots)
