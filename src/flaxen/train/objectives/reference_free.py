"""Preference objectives that need no reference: SimPO, CPO, ORPO."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from flaxen.train.objectives.dpo import smoothed
from flaxen.train.objectives.preference import Pairs, Preference


def mean_logps(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Of a token of either answer."""
    return pairs.chosen / pairs.chosen_length, pairs.rejected / pairs.rejected_length


class Simpo(Preference):
    """-log sigmoid(beta * (mean log p of chosen - of rejected) - simpo_gamma).

    Source: https://arxiv.org/abs/2405.14734, equation 6.
    """

    reads: ClassVar = ("beta", "simpo_gamma", "dpo_label_smoothing")

    def losses(self, pairs: Pairs) -> jax.Array:
        config, (chosen, rejected) = self.config, mean_logps(pairs)
        logits = config.beta * (chosen - rejected) - config.simpo_gamma
        return smoothed(logits, config.dpo_label_smoothing)

    def rewards(self, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        chosen, rejected = mean_logps(pairs)
        return self.config.beta * chosen, self.config.beta * rejected


class Cpo(Preference):
    """DPO's loss with an even reference, and `cpo_alpha` times -log p of a token of the chosen
    answer.

    Source: https://arxiv.org/abs/2401.08417, equation 3.
    """

    reads: ClassVar = ("beta", "cpo_alpha", "dpo_label_smoothing")

    def losses(self, pairs: Pairs) -> jax.Array:
        config = self.config
        logits = config.beta * (pairs.chosen - pairs.rejected)
        return (
            smoothed(logits, config.dpo_label_smoothing) - config.cpo_alpha * mean_logps(pairs)[0]
        )


class Orpo(Preference):
    """-log p of a token of the chosen answer, and `beta` times -log sigmoid of how much greater its
    log odds are than those of the rejected one, p being the geometric mean over tokens.

    Source: https://arxiv.org/abs/2403.07691, equations 6 and 7.
    """

    reads: ClassVar = ("beta",)

    def losses(self, pairs: Pairs) -> jax.Array:
        chosen, rejected = mean_logps(pairs)
        log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
        return -chosen - self.config.beta * jax.nn.log_sigmoid(log_odds)

    def rewards(self, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        chosen, rejected = mean_logps(pairs)
        return self.config.beta * chosen, self.config.beta * rejected


def log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) for x < 0, exact near 0 and far from it; x = 0 is taken as the float before.

    Source: Machler, Accurately Computing log(1 - exp(-|a|)), 2012.
    """
    x = jnp.minimum(x, -jnp.finfo(x.dtype).tiny)
    near = x > -jnp.log(2.0)
    # Each branch is given what it can be derived at.
    close = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    return jnp.where(near, close, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
