"""The step against AdamW written out in float64, and what it must leave alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny
from trained_steps import ROWS, SETTINGS, STEPS, T, batch_of, labelled, take_steps

from flaxen.core.tree import module, paths, static
from flaxen.layers.linear import Linear
from flaxen.layers.runtime import Checkpointing, Runtime
from flaxen.models.causal import forward
from flaxen.train.optim import decays, learning_rate
from flaxen.train.settings import TrainConfig
from flaxen.train.step import make_trainer, place_batch, trainable, trained_tree
from flaxen.tune import add_lora


@functools.cache
def reference() -> tuple[dict[str, np.ndarray], list[float], list[float]]:
    """Weights after 20 steps, losses and gradient norms: AdamW in float64, each batch whole."""
    with jax.enable_x64(True):
        model = tiny(folded=False)
        flat, structure = jax.tree.flatten(model.module)
        names = list(paths(model.module))
        weights = [np.asarray(x, np.float64) for x in flat]
        rule = [not name.endswith("norm.weight") for name in names]

        @jax.jit
        def gradient(weights, ids, labels):
            decoder = jax.tree.unflatten(structure, weights)
            return forward(decoder, ids, labels=labels, runtime=Runtime()).loss

        gradient = jax.jit(jax.value_and_grad(gradient))
        m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
        losses, norms = [], []
        for t in range(1, STEPS + 1):
            loss, grads = gradient(weights, *labelled(t))
            grads = [np.asarray(g) for g in grads]
            norm = np.sqrt(sum((g * g).sum() for g in grads))
            done = max(t - 1 - 3, 0) / (STEPS - 3)
            lr = 1e-2 * min(t / 3, 1) * (1 + np.cos(np.pi * done)) / 2
            for i, g in enumerate(grads):
                g = g * min(1, 0.5 / norm)
                m[i] = 0.9 * m[i] + 0.1 * g
                v[i] = 0.95 * v[i] + 0.05 * g * g
                change = (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.95**t)) + 1e-4)
                weights[i] = weights[i] - lr * (change + 0.1 * rule[i] * weights[i])
            losses.append(float(loss))
            norms.append(float(norm))
    return dict(zip(names, weights, strict=True)), losses, norms


def by_hub_layer(tree) -> dict[str, np.ndarray]:
    """Weights by path, folded layers taken apart (the model here folds with period 1)."""
    out = {}
    for path, leaf in paths(tree).items():
        if ".body.0." in path:
            for i, one in enumerate(np.asarray(leaf)):
                out[path.replace("body.0", str(i))] = one
        else:
            out[path] = np.asarray(leaf)
    return out


@functools.cache
def plain():
    """A model on one device, and its trainer, compiled once for all tests here."""
    model = tiny()
    return model, *make_trainer(model.module, model.runtime, SETTINGS, STEPS)


def take_plain_steps(batches):
    model, trainer, start = plain()
    rows = []
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), start)
    for batch in batches:
        state, metrics = trainer.step(state, trainer.frozen, place_batch(batch, model.runtime))
        rows.append({key: float(value) for key, value in metrics.items()})
    return state, rows


@pytest.mark.parametrize(
    ("mesh", "accumulation", "how"),
    [
        (None, 1, {}),
        (None, 2, {}),
        (None, 4, {}),
        ("fsdp=8", 1, {}),
        ("dp=8", 1, {}),
        ("tp=2,fsdp=4", 2, {}),
        ("sp=2,fsdp=4", 1, {"remat": True}),
        (None, 2, {"folded": False}),
        (None, 1, {"remat": True}),
    ],
)
def test_twenty_steps_are_adamw(mesh: str | None, accumulation: int, how: dict):
    """Uneven micro-batches weigh by their targets, on any mesh, whether layers are folded and
    computed again or not; norms do not decay.
    """
    want, losses, norms = reference()
    model = tiny(mesh=mesh, folded=how.get("folded", True))
    if how.get("remat"):
        again = dataclasses.replace(model.runtime, checkpointing=Checkpointing("block"))
        model = model.replace(runtime=again)
    batches = [batch_of(*labelled(t), accumulation) for t in range(1, STEPS + 1)]
    plainly = mesh is None and not how
    state, rows = take_plain_steps(batches) if plainly else take_steps(model, SETTINGS, batches)
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-5)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
    got = by_hub_layer(trained_tree(state, model.module))
    assert got.keys() == want.keys()
    for path, weight in want.items():
        np.testing.assert_allclose(got[path], weight, atol=1e-5, rtol=0, err_msg=path)
    if mesh:
        moments = jax.tree.leaves(state.opt_state)
        whole = [leaf.sharding.spec for leaf in jax.tree.leaves(state.trained)]
        assert [m.sharding.spec for m in moments[1:]] == whole * 2


def test_a_window_that_is_not_full_weighs_by_its_targets():
    """Micro-batches of nine, one and no targets: the gradient of ten at once."""
    ids = np.random.default_rng(0).integers(3, 90, (ROWS, T)).astype(np.int32)
    labels = np.full((ROWS, T), -100, np.int32)
    labels[0, 1:10], labels[2, 1] = ids[0, 1:10], ids[2, 1]
    (whole,), (parts,) = (take_plain_steps([batch_of(ids, labels, n)])[1] for n in (1, 4))
    assert whole["tokens"] == parts["tokens"] == 10
    np.testing.assert_allclose(parts["grad_norm"], whole["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-6)


def test_a_batch_without_targets_changes_nothing_but_is_counted():
    ids, labels = labelled(1)
    state, rows = take_plain_steps([batch_of(ids, np.full_like(labels, -100))])
    assert (rows[0]["loss"], rows[0]["grad_norm"], int(state.step)) == (0, 0, 1)
    for now, before in zip(jax.tree.leaves(state), jax.tree.leaves(plain()[2]), strict=True):
        if now is not state.step:
            np.testing.assert_array_equal(now, before)


@module
class Constant:
    """A model whose loss is `slope * weight`, in the dtype of the weight."""

    proj: Linear
    embed_positions: static[None] = None
    balance: static[None] = None

    def context(self, positions, scene, runtime, at=None, dropout_key=None):
        return None

    def loss(self, ids, targets, ctx, extra=None, **terms):
        slope = ids.astype(jnp.float32).mean()
        return (self.proj.weight.astype(jnp.float32) * slope).sum(), jnp.array(1)


def constant(value: float, dtype) -> Constant:
    return Constant(proj=Linear(weight=jnp.full((1, 1), value, dtype)))


def one_target(slope: float) -> dict[str, np.ndarray]:
    ids = np.full((1, 1, 2), slope, np.float32)
    return {"ids": ids, "targets": np.array([[[1, -100]]], np.int32)}


@dataclasses.dataclass(frozen=True)
class Bare:
    module: Constant
    runtime: Runtime = Runtime()


PLAIN = TrainConfig(output="unused", learning_rate=6e-4, schedule="constant", clip=None)


def test_bfloat16_training_keeps_small_updates():
    """100 Adam steps of 6e-4 move the master by 0.06; in bfloat16 each would round away."""
    model = Bare(constant(1.0, jnp.bfloat16))
    state, _ = take_steps(model, PLAIN, [one_target(1.0)] * 100)
    (master,) = jax.tree.leaves(state.trained)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state)[1:]} == {jnp.dtype("float32")}
    np.testing.assert_allclose(master, 1 - 0.06, atol=1e-5)
    after = trained_tree(state, model.module).proj.weight
    assert after.dtype == jnp.bfloat16


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    model = Bare(constant(1.0, jnp.float32))
    batches = [one_target(x) for x in (np.nan, np.inf, 1.0, np.nan)]
    state, rows = take_steps(model, PLAIN, batches)
    assert [row["bad"] for row in rows] == [1, 2, 0, 1]
    np.testing.assert_allclose(jax.tree.leaves(state.trained)[0], 1 - 6e-4, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_only_matrices_decay(name: str):
    """qwen2's q_proj bias is two-dimensional here, and norms are when folded; neither decays."""
    rule = paths(decays(tiny(name).module))
    decaying = {path.rpartition(".")[0].rpartition(".")[2] for path, yes in rule.items() if yes}
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert decaying - {"lm_head"} == {*projections, "embed_tokens"}
    assert not any(yes for path, yes in rule.items() if path.endswith("bias") or "norm" in path)


def test_decay_without_gradients_shrinks_the_adapters_only():
    """sgd with zero gradients: trained matrices shrink by lr * decay, the base keeps its bits."""
    model = tiny()
    adapted = model.replace(module=add_lora(model.module, rank=2))
    before = {path: np.array(leaf) for path, leaf in paths(adapted.module).items()}
    config = dataclasses.replace(PLAIN, optimizer="sgd", learning_rate=0.5, weight_decay=0.1)
    # `a` has no gradient while `b` is zero; `b` has one, so its own change is left out here.
    state, _ = take_steps(adapted, config, [batch_of(*labelled(1))])
    for path, leaf in paths(trained_tree(state, adapted.module)).items():
        if path.endswith(".a"):
            np.testing.assert_allclose(leaf, before[path] * (1 - 0.5 * 0.1), rtol=1e-6)
        elif not path.endswith(".b"):
            np.testing.assert_array_equal(leaf, before[path])


def test_the_optimiser_knows_the_adapters_only():
    adapted = add_lora(tiny().module, rank=2)
    _, state = make_trainer(adapted, Runtime(), PLAIN, 1)
    keep = trainable(adapted)
    wanted = [x.shape for path, x in paths(adapted).items() if keep(path, x)]
    assert [x.shape for x in jax.tree.leaves(state.trained)] == wanted
    assert [x.shape for x in jax.tree.leaves(state.opt_state)[1:]] == wanted * 2


def test_training_leaves_the_given_model_alive():
    model = Bare(constant(1.0, jnp.float32))
    take_steps(model, PLAIN, [one_target(1.0)])
    np.testing.assert_array_equal(model.module.proj.weight, [[1.0]])


def test_a_step_compiles_once():
    model = Bare(constant(1.0, jnp.float32))
    trainer, state = make_trainer(model.module, model.runtime, PLAIN, 3)
    for _ in range(3):
        state, _ = trainer.step(state, trainer.frozen, place_batch(one_target(1.0), model.runtime))
        trainer.evaluate(state, trainer.frozen, place_batch(one_target(1.0), model.runtime))
    assert (trainer.step._cache_size(), trainer.evaluate._cache_size()) == (1, 1)


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466]),
        ("wsd", [0.5, 1, 1, 1, 1, 0.5]),
    ],
)
def test_schedules(schedule: str, want: list[float]):
    config = dataclasses.replace(
        SETTINGS, schedule=schedule, warmup=2, learning_rate=1.0, decay_share=0.5
    )
    rate = learning_rate(config, 6)
    np.testing.assert_allclose([float(rate(jnp.int32(i))) for i in range(6)], want, rtol=1e-6)


def test_a_schedule_can_end_above_zero():
    config = dataclasses.replace(
        SETTINGS, schedule="linear", warmup=0, learning_rate=2.0, end_ratio=0.25
    )
    np.testing.assert_allclose(float(learning_rate(config, 4)(jnp.int32(4))), 0.5)


def test_a_scaled_loss_changes_no_gradient_and_the_scale_halves_on_overflow():
    """Slopes 1, then infinite, then 1: two steps of 6e-4, the scale 64, 32, 32."""
    model = Bare(constant(1.0, jnp.float32))
    config = dataclasses.replace(PLAIN, loss_scale=64.0)
    batches = [one_target(x) for x in (1.0, np.inf, 1.0)]
    state, rows = take_steps(model, config, batches)
    assert [row["grad_norm"] for row in rows if np.isfinite(row["grad_norm"])] == [1.0, 1.0]
    assert [row["skipped"] for row in rows] == [0, 1, 1]
    assert [row["bad"] for row in rows] == [0, 0, 0]  # the scale could still fall
    assert float(state.scale) == 32.0
    np.testing.assert_allclose(jax.tree.leaves(state.trained)[0], 1 - 2 * 6e-4, rtol=1e-6)
