"""Optimisers and learning-rate schedules by name, and which weights decay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxen.core.registry import Registry
from flaxen.core.tree import name_of
from flaxen.layers.linear import Linear
from flaxen.layers.moe import Projections
from flaxen.models.fold import in_body
from flaxen.train.settings import TrainConfig

Schedule = Callable[[jax.Array], jax.Array]

OPTIMIZERS: Registry[Callable[[TrainConfig, Any], Any]] = Registry("optimizer")
"""Each makes, for the trained weights (None where one is frozen), the optax transformation from
gradients to a direction, or a `Guarded` one; learning rate and decay are applied after it.
"""

SCHEDULES: Registry[Callable[[jax.Array, TrainConfig], jax.Array]] = Registry("schedule")
"""Each maps the part of the steps after warm-up that is over, 0 to 1, to a part of the learning
rate.
"""


class Guarded(NamedTuple):
    """An optax transformation whose update(grads, state, params, counts) leaves the state as it was
    where `counts` is False.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


def guarded(optimizer: Any) -> Guarded:
    """The same transformation, guarded."""
    if isinstance(optimizer, Guarded):
        return optimizer

    def update(grads: Any, state: Any, params: Any, counts: jax.Array) -> tuple[Any, Any]:
        direction, new = optimizer.update(grads, state, params)
        return direction, jax.tree.map(lambda new, old: jnp.where(counts, new, old), new, state)

    return Guarded(optimizer.init, update)


def _adamw(config: TrainConfig, trained: Any) -> Any:
    """optax's Adam, whose direction is made of the moments that stay: were they chosen after it,
    XLA would copy each one before the step changes it.
    """
    import optax

    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    decay = (config.beta1, config.beta2)

    def update(grads: Any, state: Any, params: Any, counts: jax.Array) -> tuple[Any, Any]:
        def moment(old: Any, order: int) -> Any:
            beta = decay[order - 1]
            new = lambda g, m: jnp.where(counts, beta * m + (1 - beta) * g**order, m)
            return jax.tree.map(new, grads, old)

        mu, nu, count = moment(state.mu, 1), moment(state.nu, 2), state.count + 1
        first, second = (1 - jnp.float32(beta) ** count for beta in decay)
        length = lambda m, v: (m / first) / (jnp.sqrt(v / second) + config.eps)
        count = jnp.where(counts, count, state.count)
        return jax.tree.map(length, mu, nu), optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return Guarded(adam.init, update)


def _lion(config: TrainConfig, trained: Any) -> Any:
    import optax

    return optax.scale_by_lion(b1=config.beta1, b2=config.beta2)


def _sgd(config: TrainConfig, trained: Any) -> Any:
    import optax

    return optax.identity()


def _momentum(config: TrainConfig, trained: Any) -> Any:
    import optax

    return optax.trace(decay=config.beta1)


def _adagrad(config: TrainConfig, trained: Any) -> Any:
    import optax

    return optax.scale_by_rss(eps=config.eps)


def _adafactor(config: TrainConfig, trained: Any) -> Any:
    """https://arxiv.org/abs/1804.04235, with the run's learning rate and no momentum."""
    import optax

    return optax.chain(optax.scale_by_factored_rms(), optax.stateless(_short(in_body(trained))))


def _short(folded: Callable[[str], bool]) -> Callable[[Any, Any], Any]:
    """Directions whose root mean square is above one, made that long; of folded layers, of each."""

    def shorten(path: Any, x: jax.Array) -> jax.Array:
        stacked = folded(jax.tree_util.keystr(path, simple=True, separator="."))
        axes = tuple(range(int(stacked), x.ndim))
        rms = jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True))
        return x / jnp.maximum(1.0, rms)

    return lambda directions, _: jax.tree.map_with_path(shorten, directions)


def _muon(config: TrainConfig, trained: Any) -> Any:
    """Projections inside the layers by Muon, whose steps are as long as AdamW's
    (https://arxiv.org/abs/2502.16982); all else by Adam.
    """
    import optax

    muon = optax.contrib.muon(
        1.0,
        beta=0.95,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_matrices(trained),
    )
    return optax.chain(muon, optax.scale(-1.0))


def _matrices(trained: Any) -> Any:
    """Which axes of a weight are the inputs and outputs of a matrix; None where it is none."""
    from optax.contrib import MuonDimensionNumbers

    body = in_body(trained)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    is_matrix = lambda x: isinstance(x, Linear | Projections)

    def axes(path: Any, x: Any) -> Any:
        if (
            not is_matrix(x)
            or not isinstance(x.weight, jax.Array | jax.ShapeDtypeStruct)
            or "layers" not in name(path)
        ):
            return jax.tree.map(lambda _: None, x)
        inputs = x.contract if isinstance(x, Linear) else 1
        first = int(body(name(path) + ".weight")) + isinstance(x, Projections)
        ndim = x.weight.ndim
        numbers = MuonDimensionNumbers(
            tuple(range(ndim - inputs, ndim)), tuple(range(first, ndim - inputs))
        )
        return dataclasses.replace(x, weight=numbers, bias=None)

    return jax.tree.map_with_path(axes, trained, is_leaf=is_matrix)


for _name, _function in {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adafactor": _adafactor,
    "muon": _muon,
}.items():
    OPTIMIZERS.register(_name, _function)


def _wsd(done: jax.Array, config: TrainConfig) -> jax.Array:
    """Stable, then down in a line over the last part (https://arxiv.org/abs/2404.06395)."""
    return jnp.minimum(1, (1 - done) / config.decay_share)


SCHEDULES.register("constant", lambda done, config: jnp.ones_like(done))
SCHEDULES.register("linear", lambda done, config: 1 - done)
SCHEDULES.register("cosine", lambda done, config: (1 + jnp.cos(math.pi * done)) / 2)
SCHEDULES.register("wsd", _wsd)


def learning_rate(config: TrainConfig, steps: int) -> Schedule:
    """The learning rate of step 0, 1, ...: linear up to `learning_rate` over `warmup` steps, then
    the schedule to the end, where `end_ratio` of it is left.

    The first step of a warm-up of n has 1/n of it, not 0.
    """
    shape, warm = SCHEDULES[config.schedule], config.warmup

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warm) / max(steps - warm, 1), 0, 1)
        part = config.end_ratio + (1 - config.end_ratio) * shape(done, config)
        return config.learning_rate * jnp.minimum((step + 1) / max(warm, 1), 1) * part

    return rate


def decays(tree: Any) -> Any:
    """A tree of booleans: True for matrices, False for biases, norms, DoRA's lengths and what else
    is a vector in each layer.
    """
    folded = in_body(tree)

    def decay(path: Any, leaf: Any) -> bool:
        where = name_of(path)
        return leaf.ndim - folded(where) >= 2 and where.rpartition(".")[2] not in (
            "bias",
            "magnitude",
        )

    return jax.tree.map_with_path(decay, tree)
