"""Optimisers whose state is not shaped like the weights, and what they do to matrices."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny
from trained_steps import SETTINGS, batch_of, labelled, take_steps

from flaxen.core.tree import paths
from flaxen.train.moments import opt_state
from flaxen.train.objectives.causal import neftune
from flaxen.train.optim import OPTIMIZERS
from flaxen.train.step import make_trainer, place_batch, trained_tree


def unfolded(tree) -> dict[str, np.ndarray]:
    out = {}
    for path, leaf in paths(tree).items():
        if ".body.0." in path:
            out |= {path.replace("body.0", str(i)): x for i, x in enumerate(np.asarray(leaf))}
        else:
            out[path] = np.asarray(leaf)
    return out


@pytest.mark.parametrize(
    "optimizer",
    [
        "muon",
        pytest.param("adafactor", marks=pytest.mark.exhaustive),
        pytest.param("lion", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_is_the_same_on_a_mesh_and_with_folded_layers(optimizer: str):
    config = dataclasses.replace(SETTINGS, optimizer=optimizer, warmup=0)
    results = []
    for model in (tiny(folded=False), tiny(mesh="fsdp=4,tp=2")):
        state, _ = take_steps(model, config, [batch_of(*labelled(t)) for t in (1, 2)])
        results.append(unfolded(trained_tree(state, model.module)))
    alone, meshed = results
    assert alone.keys() == meshed.keys()
    for path, weight in alone.items():
        np.testing.assert_allclose(meshed[path], weight, atol=2e-5, err_msg=path)


def test_muon_makes_every_direction_of_a_projection_about_equally_long():
    """0.2 * sqrt(larger side) times something near an orthogonal matrix, heads flat as in the file;
    embeddings and norms go by Adam, whose first direction is the sign of the gradient.
    """
    model = tiny(folded=False).module
    optimizer = OPTIMIZERS["muon"](SETTINGS, model)
    draw = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(draw.standard_normal(x.shape), x.dtype), model)
    direction, _ = optimizer.update(grads, opt_state(optimizer, model), model)
    for path in ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"):
        step, slope = paths(direction)[path], paths(grads)[path]
        inputs = slope.shape[-1]
        step, slope = (np.asarray(x, np.float64).reshape(-1, inputs) for x in (step, slope))
        long = np.linalg.svd(step, compute_uv=False) / (0.2 * np.sqrt(max(slope.shape)))
        assert np.quantile(long, 0.1) > 0.6 and long.max() < 1.25
        left, _, right = np.linalg.svd(slope, full_matrices=False)
        alike = (step * (left @ right)).sum() / np.linalg.norm(step) / np.linalg.norm(left @ right)
        assert alike > 0.97
    embed = "embed_tokens.weight"
    assert (np.sign(paths(direction)[embed]) == np.sign(paths(grads)[embed])).all()


def test_neftune_noise_is_uniform_and_of_its_size():
    noise = np.asarray(neftune(jax.random.key(0), (4, 16, 64), 5.0))
    bound = 5.0 / np.sqrt(16 * 64)
    assert np.abs(noise).max() <= bound
    np.testing.assert_allclose(noise.std(), bound / np.sqrt(3), rtol=0.03)


@pytest.mark.exhaustive
def test_noise_is_for_training_alone():
    """The first loss differs with NEFTune, the evaluation does not."""
    plain, noisy = (
        dataclasses.replace(SETTINGS, neftune_alpha=alpha, label_smoothing=alpha / 100)
        for alpha in (0.0, 10.0)
    )
    batch = batch_of(*labelled(1))
    losses, evals = [], []
    for config in (plain, noisy):
        model = tiny()
        trainer, state = make_trainer(model.module, model.runtime, config, 2)
        placed = place_batch(batch, model.runtime)
        evals.append(float(trainer.evaluate(state, trainer.frozen, placed)[0]))
        losses.append(float(trainer.step(state, trainer.frozen, placed)[1]["loss"]))
    assert evals[0] == evals[1]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_adams_moments_change_in_place():
    model = tiny()
    trainer, state = make_trainer(model.module, model.runtime, SETTINGS, 3)
    batch = place_batch(batch_of(*labelled(1)), model.runtime)
    text = trainer.step.lower(state, trainer.frozen, batch).compile().as_text()
    assert "%state_opt_state_mu_" in text
    assert re.findall(r"copy\(%state_opt_state_[mn]u_[^)]*", text) == []
