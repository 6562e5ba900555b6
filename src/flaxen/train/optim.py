"""Optimisers and learning-rate schedules by name, and which weights decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.registry import Registry
from flaxen.core.tree import name_of
from flaxen.models.fold import in_body
from flaxen.train.config import TrainConfig

Schedule = Callable[[jax.Array], jax.Array]

OPTIMIZERS: Registry[Callable[[TrainConfig], Any]] = Registry("optimizer")
"""Each makes the optax transformation from gradients to a direction; learning rate and decay are
applied after it.
"""

SCHEDULES: Registry[Callable[[jax.Array], jax.Array]] = Registry("schedule")
"""Each maps the part of the steps after warm-up that is over, 0 to 1, to a part of the learning
rate.
"""


def _adamw(config: TrainConfig) -> Any:
    import optax

    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)


def _lion(config: TrainConfig) -> Any:
    import optax

    return optax.scale_by_lion(b1=config.beta1, b2=config.beta2)


def _sgd(config: TrainConfig) -> Any:
    import optax

    return optax.identity()


def _momentum(config: TrainConfig) -> Any:
    import optax

    return optax.trace(decay=config.beta1)


def _adagrad(config: TrainConfig) -> Any:
    import optax

    return optax.scale_by_rss(eps=config.eps)


for _name, _function in {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
}.items():
    OPTIMIZERS.register(_name, _function)

SCHEDULES.register("constant", jnp.ones_like)
SCHEDULES.register("linear", lambda done: 1 - done)
SCHEDULES.register("cosine", lambda done: (1 + jnp.cos(math.pi * done)) / 2)


def learning_rate(config: TrainConfig, steps: int) -> Schedule:
    """The learning rate of step 0, 1, ...: linear up to `learning_rate` over `warmup` steps, then
    the schedule to the end.

    The first step of a warm-up of n has 1/n of it, not 0.
    """
    shape, warm = SCHEDULES[config.schedule], config.warmup

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warm) / max(steps - warm, 1), 0, 1)
        return config.learning_rate * jnp.minimum((step + 1) / max(warm, 1), 1) * shape(done)

    return rate


def decays(tree: Any) -> Any:
    """A tree of booleans: True for matrices, False for biases, norms and what else is a vector in
    each layer.
    """
    folded = in_body(tree)

    def decay(path: Any, leaf: Any) -> bool:
        where = name_of(path)
        return leaf.ndim - folded(where) >= 2 and where.rpartition(".")[2] != "bias"

    return jax.tree.map_with_path(decay, tree)
