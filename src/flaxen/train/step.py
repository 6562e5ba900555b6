"""One training step: micro-batches inside, one mean over all targets, one update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flaxen.core.errors import ConfigError
from flaxen.core.tree import combine, module, partition
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import whole_context
from flaxen.quantize import QuantizedWeight
from flaxen.train.config import TrainConfig
from flaxen.train.optim import OPTIMIZERS, Schedule, decays, learning_rate
from flaxen.tune.lora import adapters

Batch = dict[str, Any]
"""ids, targets and, for packed rows, positions and segments: int32 (accumulation, B, T).

Targets stand at the slot that predicts them; -100 is ignored.
"""

Loss = Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array]]
"""(weights, frozen weights, one micro-batch) -> sum of -log p, number of targets."""


@module
class TrainState:
    """What a step changes.

    step: batches consumed; trained: float32 weights, None where a weight is frozen; opt_state: the
    optimiser's, cut like the weights; bad: steps in a row whose gradient was not finite.
    """

    step: jax.Array
    trained: Any
    opt_state: Any
    bad: jax.Array


Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]
Gradient = Callable[[Any, Any, Batch], tuple[jax.Array, Any, jax.Array]]
"""(masters, frozen weights, batch) -> mean -log p over all targets of all micro-batches, its
float32 gradient, number of targets.
"""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one model and one configuration.

    step(state, frozen, batch) -> (state, metrics) uses up the given state; evaluate(state, frozen,
    batch) -> (sum of -log p, targets).
    """

    frozen: Any
    step: Step
    evaluate: Callable[[TrainState, Any, Batch], tuple[jax.Array, jax.Array]]


def make_trainer(
    tree: Any, runtime: Runtime, config: TrainConfig, steps: int
) -> tuple[Trainer, TrainState]:
    """How to train the adapters of a model if it has any, else all its floats, and the state at
    step 0.

    `steps` is where the schedule ends. The given weights stay as they are. Of a model of shapes
    (`jax.ShapeDtypeStruct` with shardings) the state is shapes too, and the functions can be
    lowered for them.

    Raises:
        ConfigError: weights would be trained that are packed.
    """
    if not adapters(tree) and any(map(_is_packed, jax.tree.leaves(tree, is_leaf=_is_packed))):
        raise ConfigError(
            "The model holds packed weights, whose codes cannot be trained. Train adapters on top "
            "(lora_rank), or load the model with quantized='dequantize'."
        )
    trained, frozen = partition(tree, trainable(tree))
    optimizer, masters = OPTIMIZERS[config.optimizer](config), jax.tree.map(_master, trained)
    kinds = jax.tree.map(lambda x: x.dtype, trained)
    if config.dtype is not None:
        frozen = jax.tree.map(lambda x: _in_dtype(x, config.dtype), frozen, is_leaf=_is_packed)
        if not adapters(tree):
            kinds = jax.tree.map(lambda x: jnp.dtype(config.dtype), trained)
    start = TrainState(
        step=_zero(masters),
        trained=masters,
        opt_state=opt_state(optimizer, masters),
        bad=_zero(masters),
    )
    loss = _loss(runtime)
    cast = lambda masters: jax.tree.map(lambda x, kind: x.astype(kind), masters, kinds)
    gradient = _gradient(loss, cast, jax.tree.map(lambda x: x.sharding, masters))
    step = _step(gradient, optimizer, learning_rate(config, steps), decays(trained), config)

    def evaluate(state: TrainState, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss(cast(state.trained), frozen, {key: rows[0] for key, rows in batch.items()})

    where = jax.tree.map(lambda x: x.sharding, start)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
    # Put there explicitly: else the second step, on what the first returned, compiles anew.
    put = start if _is_shape(start.step) else jax.device_put(start, where)
    return Trainer(frozen, compiled, jax.jit(evaluate)), put


def trainable(tree: Any) -> Callable[[str, Any], bool]:
    """Which leaves are trained: the adapters if there are any, else every float."""
    found = adapters(tree)
    if found:
        wanted = {f"{path}.{side}" for path in found for side in "ab"}
        return lambda path, leaf: path in wanted
    return lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.floating)


def trained_tree(state: TrainState, tree: Any) -> Any:
    """`tree` with the trained weights in it, each in the dtype it has there; frozen ones are the
    very same arrays.
    """
    before, frozen = partition(tree, trainable(tree))
    now = jax.tree.map(lambda x, old: x.astype(old.dtype), state.trained, before)
    return combine(now, frozen)


def place_batch(batch: dict[str, np.ndarray], runtime: Runtime) -> Batch:
    """The batch on the devices, each with its own rows."""
    if runtime.placement is None:
        return jax.device_put(batch)
    shape = next(iter(batch.values())).shape
    spec = runtime.placement.activation_spec(shape[1:], ("batch", "seq"))
    where = NamedSharding(runtime.placement.mesh, PartitionSpec(None, *spec))
    return {
        key: jax.make_array_from_callback(shape, where, rows.__getitem__)
        for key, rows in batch.items()
    }


def _loss(runtime: Runtime) -> Loss:
    def loss(weights: Any, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        decoder, ids = combine(weights, frozen), batch["ids"]
        ctx = whole_context(
            decoder,
            ids.shape,
            runtime,
            position_ids=batch.get("positions"),
            segment_ids=batch.get("segments"),
            dropout_key=batch.get("dropout_keys"),
        )
        return decoder.loss(ids, batch["targets"], ctx)

    return loss


def _gradient(loss: Loss, cast: Callable[[Any], Any], where: Any) -> Gradient:
    def one(weights: Any, frozen: Any, batch: Batch, share: jax.Array) -> tuple[jax.Array, Any]:
        mean = lambda weights: loss(weights, frozen, batch)[0] * share
        value, grads = jax.value_and_grad(mean)(weights)
        wide = lambda g, sharding: _laid_out(g.astype(jnp.float32), sharding)
        return value, jax.tree.map(wide, grads, where)

    def gradient(masters: Any, frozen: Any, batch: Batch) -> tuple[jax.Array, Any, jax.Array]:
        weights, total = cast(masters), (batch["targets"] != IGNORED).sum()
        share = 1 / jnp.maximum(total, 1).astype(jnp.float32)
        if batch["ids"].shape[0] == 1:
            single = {key: rows[0] for key, rows in batch.items()}
            return *one(weights, frozen, single, share), total

        def add(sums: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, one(weights, frozen, micro, share)), None

        zeros = jax.tree.map(lambda x, s: _laid_out(jnp.zeros_like(x), s), masters, where)
        (value, grads), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), batch)
        return value, grads, total

    return gradient


def _step(
    gradient: Gradient, optimizer: Any, rate: Schedule, decay: Any, config: TrainConfig
) -> Step:
    """The update. A batch without targets and a gradient that is not finite change no weight and no
    moment.
    """

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        old, lr = state.trained, rate(state.step)
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        keys = jax.random.split(key, batch["ids"].shape[0])
        value, grads, total = gradient(old, frozen, batch | {"dropout_keys": keys})
        norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(grads)), jnp.zeros(())))
        finite = jnp.isfinite(norm) & jnp.isfinite(value)
        if config.clip is not None:
            factor = jnp.minimum(1, config.clip / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * factor, grads)
        direction, opt_state = optimizer.update(grads, state.opt_state, old)
        pull = lambda p, decays: config.weight_decay * p if decays else 0
        new = jax.tree.map(lambda p, u, d: p - lr * (u + pull(p, d)), old, direction, decay)
        keep = lambda new, old: jnp.where(finite & (total > 0), new, old)
        bad = jnp.where(finite, 0, state.bad + 1)
        state = TrainState(
            step=state.step + 1,
            trained=jax.tree.map(keep, new, old),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
            bad=bad,
        )
        metrics = {"loss": value, "tokens": total, "grad_norm": norm, "lr": lr, "bad": bad}
        return state, metrics

    return step


def _laid_out(x: jax.Array, sharding: Sharding) -> jax.Array:
    return (
        jax.lax.with_sharding_constraint(x, sharding) if isinstance(sharding, NamedSharding) else x
    )


def _master(x: Any) -> Any:
    """A float32 copy that may be given up without hurting the original."""
    if _is_shape(x):
        return x.update(dtype=jnp.dtype(jnp.float32))
    return jnp.array(x, jnp.float32, copy=True)


def _is_packed(x: Any) -> bool:
    return isinstance(x, QuantizedWeight)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _in_dtype(x: Any, dtype: Any) -> Any:
    """Floats in a dtype; of a packed weight the values, its codes and scales stay."""
    if _is_packed(x):
        return dataclasses.replace(x, dtype=jnp.dtype(dtype))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.update(dtype=jnp.dtype(dtype)) if _is_shape(x) else x.astype(dtype)


def opt_state(optimizer: Any, masters: Any) -> Any:
    """The optimiser's first state, each moment where its weight is."""
    shapes = opt_shapes(optimizer, masters)
    if any(map(_is_shape, jax.tree.leaves(masters))):
        return shapes
    where = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(optimizer.init, out_shardings=where)(masters)


def opt_shapes(optimizer: Any, masters: Any) -> Any:
    """The shapes and shardings of that state, for weights or their shapes and shardings."""
    import optax

    shapes = jax.eval_shape(optimizer.init, masters)
    where = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, weight: weight.sharding,
        shapes,
        masters,
        transform_non_params=lambda _: _everywhere(masters),
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        where,
    )


def _everywhere(masters: Any) -> Sharding:
    """Whole on every device that the weights are on."""
    sharding = jax.tree.leaves(masters)[0].sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _zero(masters: Any) -> Any:
    if any(map(_is_shape, jax.tree.leaves(masters))):
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=_everywhere(masters))
    return jax.device_put(jnp.zeros((), jnp.int32), _everywhere(masters))
