"""One training step: micro-batches inside, one mean over all that counts, one update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxen.core.errors import ConfigError
from flaxen.core.tree import buffers, combine, module, name_of, partition
from flaxen.layers.runtime import Runtime
from flaxen.quantize import QuantizedWeight
from flaxen.train.gradient import Gradient, Loss, gradient_of
from flaxen.train.moments import everywhere, is_shape, opt_state
from flaxen.train.objectives import OBJECTIVES, Batch, Metrics, Objective
from flaxen.train.optim import OPTIMIZERS, Guarded, Schedule, decays, guarded, learning_rate
from flaxen.train.settings import TrainConfig
from flaxen.tune import adapters, trainable_paths, with_dropout, without_adapters


@module
class TrainState:
    """What a step changes.

    step: batches consumed; trained: float32 weights, None where a weight is frozen; opt_state: the
    optimiser's, cut like the weights; bad: steps in a row whose gradient was not finite; skipped:
    all such steps; scale: of the loss while its gradient is computed; good: steps since that scale
    changed.
    """

    step: jax.Array
    trained: Any
    opt_state: Any
    bad: jax.Array
    skipped: jax.Array
    scale: jax.Array
    good: jax.Array


@module
class Frozen:
    """What a step does not change: the model's other weights, and the model that it is compared
    with, if any.
    """

    weights: Any
    reference: Any = None


Step = Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one model and one configuration.

    step(state, frozen, batch) -> (state, metrics) uses up the given state; evaluate(state, frozen,
    batch) -> (sum of the losses, sums of what else is told, weight); observe(state, frozen, batch)
    -> what the objective adds to a batch that was made online.
    """

    frozen: Frozen
    step: Step
    evaluate: Callable[[TrainState, Any, Batch], tuple[jax.Array, Metrics, jax.Array]]
    observe: Callable[[TrainState, Any, Batch], Batch]


def make_trainer(
    tree: Any,
    runtime: Runtime,
    config: TrainConfig,
    steps: int,
    *,
    objective: Objective | None = None,
    reference: Any = None,
) -> tuple[Trainer, TrainState]:
    """How to train the adapters of a model if it has any, else all its floats, and the state at
    step 0.

    `steps` is where the schedule ends. objective: by default the one that the settings name;
    reference: the tree that it compares with, if it does; by default the given one as it is. The
    given weights stay as they are. Of a model of shapes (`jax.ShapeDtypeStruct` with shardings) the
    state is shapes too, and the functions can be lowered for them.

    Raises:
        ConfigError: weights would be trained that are packed.
    """
    if not adapters(tree) and any(map(_is_packed, jax.tree.leaves(tree, is_leaf=_is_packed))):
        raise ConfigError(
            "The model holds packed weights, whose codes cannot be trained. Train adapters on top "
            "(lora_rank), or load the model with quantized='dequantize'."
        )
    objective = objective or OBJECTIVES[config.objective](config)
    tree = jax.tree.map(lambda x: _computing(x, config.dtype), tree, is_leaf=_is_packed)
    trained, weights = partition(tree, trainable(tree))
    optimizer, masters = (
        guarded(OPTIMIZERS[config.optimizer](config, trained)),
        jax.tree.map(_master, trained),
    )
    kinds = jax.tree.map(lambda x: x.dtype, trained)
    if objective.compares and reference is None and not adapters(tree):
        reference = tree
    if config.dtype is not None:
        held, kind = set(buffers(tree)), config.dtype
        narrow = lambda tree: jax.tree.map_with_path(
            lambda path, x: x if name_of(path) in held else _in_dtype(x, kind),
            tree,
            is_leaf=_is_packed,
        )
        reference = jax.tree.map(lambda x: _computing(x, kind), reference, is_leaf=_is_packed)
        weights, reference = narrow(weights), narrow(reference)
        if not adapters(tree):
            kinds = jax.tree.map(lambda x: jnp.dtype(config.dtype), trained)
    start = TrainState(
        step=_zero(masters),
        trained=masters,
        opt_state=opt_state(optimizer, masters),
        bad=_zero(masters),
        skipped=_zero(masters),
        scale=_number(config.loss_scale or 1.0, jnp.float32, masters),
        good=_zero(masters),
    )
    loss = _loss(objective, runtime)
    cast = lambda masters: jax.tree.map(lambda x, kind: x.astype(kind), masters, kinds)
    where = jax.tree.map(lambda x: x.sharding, masters)
    gradient = gradient_of(loss, objective.weight, cast, where)
    step = _step(gradient, optimizer, learning_rate(config, steps), decays(trained), config)

    def evaluate(state: TrainState, frozen: Any, batch: Batch) -> Any:
        micro = {key: rows[0] for key, rows in batch.items()}
        return *loss(cast(state.trained), frozen, micro), objective.weight(batch)

    def observe(state: TrainState, frozen: Frozen, batch: Batch) -> Batch:
        models = _models(objective, cast(state.trained), frozen)
        return jax.lax.map(lambda micro: objective.observed(*models, micro, runtime), batch)

    where = jax.tree.map(lambda x: x.sharding, start)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
    frozen = Frozen(weights=weights, reference=reference)
    # Put there explicitly: else the second step, on what the first returned, compiles anew.
    put = start if is_shape(start.step) else jax.device_put(start, where)
    return Trainer(frozen, compiled, jax.jit(evaluate), jax.jit(observe)), put


def trainable(tree: Any) -> Callable[[str, Any], bool]:
    """Which leaves are trained: the adapters, if there are any, and the head that a task began
    with; else every float but buffers.
    """
    if adapters(tree):
        wanted = trainable_paths(tree)
        heads = tuple(f"{head}." for head in tree.heads()) if hasattr(tree, "heads") else ()
        return lambda path, leaf: path in wanted or path.startswith(heads)
    held = set(buffers(tree))
    return lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.floating) and path not in held


def trained_tree(state: TrainState, tree: Any) -> Any:
    """`tree` with the trained weights in it, each in the dtype it has there; frozen ones are the
    very same arrays.
    """
    before, frozen = partition(tree, trainable(tree))
    # By order: packed weights, which are not trained, may have computed in another dtype.
    leaves = zip(jax.tree.leaves(state.trained), jax.tree.leaves(before), strict=True)
    now = [x.astype(old.dtype) for x, old in leaves]
    return combine(jax.tree.unflatten(jax.tree.structure(before), now), frozen)


def place_batch(batch: dict[str, np.ndarray], runtime: Runtime) -> Batch:
    """The batch on the devices, each with its own rows."""
    placement = runtime.placement
    if placement is None:
        return jax.device_put(batch)

    def placed(x: np.ndarray) -> jax.Array:
        spec = placement.activation_spec(x.shape[1:], ("batch", "seq")[: x.ndim - 1])
        where = NamedSharding(placement.mesh, PartitionSpec(None, *spec))
        return jax.make_array_from_callback(x.shape, where, x.__getitem__)

    return {key: placed(x) for key, x in batch.items()}


def _loss(objective: Objective, runtime: Runtime) -> Loss:
    def loss(weights: Any, frozen: Frozen, batch: Batch) -> tuple[jax.Array, Metrics]:
        model, reference = _models(objective, weights, frozen)
        model = with_dropout(model, batch.get("dropout_keys"))
        return objective.loss(model, reference, batch, runtime)

    return loss


def _models(objective: Objective, weights: Any, frozen: Frozen) -> tuple[Any, Any]:
    """The model, and what it is compared with if it is: by default itself without adapters."""
    model, reference = combine(weights, frozen.weights), frozen.reference
    if objective.compares and reference is None:
        reference = without_adapters(model)
    return model, jax.lax.stop_gradient(reference)


def _step(
    gradient: Gradient, optimizer: Guarded, rate: Schedule, decay: Any, config: TrainConfig
) -> Step:
    """The update. A batch without targets and a gradient that is not finite change no weight and no
    moment.
    """

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        old, lr = state.trained, rate(state.step)
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        keys = jax.random.split(key, next(iter(batch.values())).shape[0])
        batch = batch | {"dropout_keys": keys}
        # A loss that is never scaled spares a pass over the gradient.
        scale = 1.0 if config.loss_scale is None else state.scale
        value, told, grads, total = gradient(old, frozen, batch, scale)
        norm = jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(grads)), jnp.zeros(())))
        finite = jnp.isfinite(norm) & jnp.isfinite(value)
        counts = finite & (total > 0)
        if config.clip is not None:
            factor = jnp.minimum(1, config.clip / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * factor, grads)
        direction, opt_state = optimizer.update(grads, state.opt_state, old, counts)
        pull = lambda p, decays: config.weight_decay * p if decays else 0
        new = jax.tree.map(lambda p, u, d: p - lr * (u + pull(p, d)), old, direction, decay)
        keep = lambda new, old: jnp.where(counts, new, old)
        state = TrainState(
            step=state.step + 1,
            trained=jax.tree.map(keep, new, old),
            opt_state=opt_state,
            **_guard(state, finite, config),
        )
        metrics = {"loss": value, "tokens": total, "grad_norm": norm, "lr": lr, "bad": state.bad}
        return state, metrics | {"skipped": state.skipped} | told

    return step


GROWTH = 2000
"""Good steps until the loss is scaled twice as much."""


def _guard(state: TrainState, finite: jax.Array, config: TrainConfig) -> dict[str, jax.Array]:
    """How often a gradient was not finite, and how the loss is scaled next. While the scale can
    still fall, an overflow is no bad sign.
    """
    scale, good, falls = state.scale, state.good, jnp.zeros((), bool)
    if config.loss_scale is not None:
        falls = scale > 1
        good = jnp.where(finite, good + 1, 0)
        grown = jnp.where(good >= GROWTH, 2 * scale, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1))
        good = jnp.where(good >= GROWTH, 0, good)
    return {
        "bad": jnp.where(finite | falls, 0, state.bad + 1),
        "skipped": state.skipped + jnp.where(finite, 0, 1),
        "scale": scale,
        "good": good,
    }


def _master(x: Any) -> Any:
    """A float32 copy that may be given up without hurting the original."""
    if is_shape(x):
        return x.update(dtype=jnp.dtype(jnp.float32))
    return jnp.array(x, jnp.float32, copy=True)


def _is_packed(x: Any) -> bool:
    return isinstance(x, QuantizedWeight)


def _computing(x: Any, dtype: Any) -> Any:
    """A packed weight whose values are of a dtype; its codes and scales stay."""
    return dataclasses.replace(x, dtype=jnp.dtype(dtype)) if dtype and _is_packed(x) else x


def _in_dtype(x: Any, dtype: Any) -> Any:
    """Floats in a dtype; packed weights stay as they are."""
    if _is_packed(x):
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.update(dtype=jnp.dtype(dtype)) if is_shape(x) else x.astype(dtype)


def _zero(masters: Any) -> Any:
    return _number(0, jnp.int32, masters)


def _number(value: float, dtype: Any, masters: Any) -> Any:
    if any(map(is_shape, jax.tree.leaves(masters))):
        return jax.ShapeDtypeStruct((), dtype, sharding=everywhere(masters))
    return jax.device_put(jnp.asarray(value, dtype), everywhere(masters))
