"""Direct preference optimisation and its kin: pairs of answers, against a reference.

Sources: DPO, https://arxiv.org/abs/2305.18290; IPO, https://arxiv.org/abs/2310.12036; the others at
their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.errors import ConfigError
from flaxen.core.registry import Registry
from flaxen.train.objectives.preference import Pairs, Preference

logsigmoid, sigmoid = jax.nn.log_sigmoid, jax.nn.sigmoid


def _ratios(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """log p / p_ref of either answer."""
    return pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected


def _delta(pairs: Pairs) -> jax.Array:
    chosen, rejected = _ratios(pairs)
    return chosen - rejected


def _mean_delta(pairs: Pairs) -> jax.Array:
    chosen, rejected = _ratios(pairs)
    return chosen / pairs.chosen_length - rejected / pairs.rejected_length


def _sigmoid(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """Conservative with eps: a part of the pairs is the other way round."""
    return smoothed(beta * _delta(pairs), eps)


def smoothed(logits: jax.Array, eps: float) -> jax.Array:
    """-log of the probability that the better one wins, which it does in 1 - eps of all cases."""
    return -(1 - eps) * logsigmoid(logits) - eps * logsigmoid(-logits)


def _hinge(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """SLiC, https://arxiv.org/abs/2305.10425."""
    return jax.nn.relu(1 - beta * _delta(pairs))


def _ipo(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """Equation 17, of means over tokens."""
    return (_mean_delta(pairs) - 1 / (2 * beta)) ** 2


def _exo_pair(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2402.00856, equation 16."""
    x = beta * _delta(pairs)
    won = sigmoid(x) * (logsigmoid(x) - jnp.log1p(-eps))
    return won + sigmoid(-x) * (logsigmoid(-x) - jnp.log(eps))


def _nca_pair(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2402.05369."""
    chosen, rejected = (beta * x for x in _ratios(pairs))
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def _robust(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2403.00409: unbiased where a part eps of the pairs was turned round."""
    x = beta * _delta(pairs)
    return (-(1 - eps) * logsigmoid(x) + eps * logsigmoid(-x)) / (1 - 2 * eps)


def _sppo_hard(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2405.00675, equation 4.7, of a chosen answer that always wins."""
    chosen, rejected = _ratios(pairs)
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def _apo_zero(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2408.06266, equation 7."""
    chosen, rejected = _ratios(pairs)
    return 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected)


def _apo_down(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """https://arxiv.org/abs/2408.06266, equation 8."""
    return sigmoid(beta * _ratios(pairs)[0]) + 1 - sigmoid(beta * _delta(pairs))


def _sigmoid_norm(pairs: Pairs, beta: float, eps: float) -> jax.Array:
    """Of means over tokens."""
    return smoothed(beta * _mean_delta(pairs), eps)


LOSSES: Registry[Callable[[Pairs, float, float], jax.Array]] = Registry("loss_type")
"""By name: (pairs, beta, dpo_label_smoothing) -> the loss of each."""

for _name, _loss in {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sigmoid_norm": _sigmoid_norm,
}.items():
    LOSSES.register(_name, _loss)

SMOOTHED = ("sigmoid", "sigmoid_norm", "exo_pair", "robust")
"""Those that `dpo_label_smoothing` changes."""


class Dpo(Preference):
    """`loss_type` is one of `LOSSES`."""

    compares: bool = True
    reads: ClassVar = ("beta", "loss_type", "dpo_label_smoothing", "reference")

    def __init__(self, config: Any, tok: Any = None, reward: Any = None):
        super().__init__(config, tok, reward)
        eps, kind = config.dpo_label_smoothing, self.loss_type
        self.of_pairs = LOSSES[kind]
        if eps and kind not in SMOOTHED:
            raise ConfigError(
                f"dpo_label_smoothing is {eps}, which the loss {kind!r} does not have; "
                f"{', '.join(SMOOTHED)} do."
            )
        if not eps and kind == "exo_pair":
            raise ConfigError(
                "The loss 'exo_pair' is infinite without dpo_label_smoothing; 1e-3 is usual."
            )

    @property
    def loss_type(self) -> str:
        return self.config.loss_type

    def losses(self, pairs: Pairs) -> jax.Array:
        return self.of_pairs(pairs, self.config.beta, self.config.dpo_label_smoothing)


class Ipo(Dpo):
    """Identity preference optimisation, whatever `loss_type` says."""

    reads: ClassVar = ("beta", "reference")
    loss_type: ClassVar[str] = "ipo"  # type: ignore[assignment]
