"""The loss of grpo: values of TRL 1.16's own loss, and advantages worked out by hand.

tests/data/grpo.json: `conformance/make_grpo.py`.
"""

from __future__ import annotations

import json
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_runs import settings

from flaxen.core.errors import ConfigError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.train import OBJECTIVES
from flaxen.train.gradient import gradient_of
from flaxen.train.objectives.advantages import SCALES, advantages, combined, moments
from flaxen.train.objectives.grpo import k3

TRL = json.loads((golden.DATA / "grpo.json").read_text())
LENGTHS = np.array(TRL["lengths"])
LOGPS = jnp.float32(TRL["logps"])
MASK = np.arange(LOGPS.shape[-1]) < LENGTHS[..., None]
NONE = np.nan


def objective(**more: Any) -> Any:
    plain = {"batch_size": 3, "accumulation": 2, "num_generations": 3, "max_completion_length": 7}
    return OBJECTIVES["grpo"](settings("grpo", **plain | more))


@pytest.mark.parametrize("case", TRL["cases"])
def test_losses_and_gradients_over_micro_batches_are_those_of_trl(case: str):
    """The weights are the log-probabilities themselves here."""
    kind, level, beta = case.split("/")
    grpo = objective(
        loss_type=kind,
        importance_sampling_level=level,
        beta=float(beta),
        epsilon=TRL["epsilon"],
        epsilon_high=TRL["epsilon_high"],
    )
    logps_of = lambda model, batch: model[batch["micro"][0]]
    grpo._logps = lambda model, batch, *_, **__: (logps_of(model, batch), -logps_of(model, batch))
    batch = {
        "micro": jnp.broadcast_to(jnp.arange(2)[:, None], (2, 3)),
        "targets": jnp.where(MASK, 1, IGNORED),
        "advantages": jnp.float32(TRL["advantages"]),
        "scale": jnp.float32(grpo.scales(LENGTHS, LENGTHS >= 0, TRL["max_completion_length"])),
        "old_logps": jnp.float32(TRL["old"]),
        "ref_logps": jnp.float32(TRL["ref"]),
        "dropout_keys": jnp.zeros(2),
    }
    loss = lambda weights, _, micro: grpo.loss(weights, None, micro, None)
    gradient = gradient_of(loss, grpo.weight, lambda x: x, LOGPS.sharding)
    value, told, slope, weight = jax.jit(gradient)(LOGPS, None, batch, 1.0)
    want = TRL["cases"][case]
    assert weight == MASK.sum()
    np.testing.assert_allclose(value, want["loss"], rtol=1e-5)
    np.testing.assert_allclose(slope, want["gradient"], atol=1e-6)
    each = LENGTHS.sum(1)
    for key in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        if key in told and (level == "token" or not key.startswith("clip")):
            mean = np.dot(want["told"][key], each) / each.sum()
            np.testing.assert_allclose(told[key], mean, rtol=1e-4, err_msg=key)
    assert ("kl" in told) == (float(beta) > 0)


def test_an_epoch_that_ends_early_divides_by_what_is_there():
    """Of four micro-batches of two rows, the first of the third is the last that is real."""
    lengths = np.array([[4, 2], [1, 3], [5, 0], [0, 0]])
    real = lengths > 0
    losses = np.random.default_rng(0).normal(size=(4, 2))  # of every token in a row
    mean = lambda kind: (SCALES[kind](lengths, real, 10) * lengths * losses).sum() / lengths.sum()
    np.testing.assert_allclose(mean("grpo"), losses[real].mean())
    np.testing.assert_allclose(mean("dapo"), (losses * lengths).sum() / 15)
    np.testing.assert_allclose(mean("dr_grpo"), (losses * lengths).sum() / (5 * 10))
    each = (losses * lengths)[:3].sum(1) / lengths[:3].sum(1)
    np.testing.assert_allclose(mean("bnpo"), each.mean())


def test_advantages_are_how_much_better_than_the_group_each_is():
    rewards = np.array([[1.0, 0, 0, 1], [2, 2, 2, 2], [0, 0, 0, 4]])
    plain = np.array([[0.5, -0.5, -0.5, 0.5], [0] * 4, [-1, -1, -1, 3]])
    np.testing.assert_allclose(advantages(rewards, "none"), plain)
    by = np.array([[1 / np.sqrt(3)], [0], [2]]) + 1e-4
    np.testing.assert_allclose(advantages(rewards, "group"), plain / by)
    every = rewards.reshape(-1).std(ddof=1)
    np.testing.assert_allclose(advantages(rewards, "batch"), plain / (every + 1e-4))
    for name, flag in (("group", True), ("none", False)):
        np.testing.assert_array_equal(advantages(rewards, flag), advantages(rewards, name))


def test_a_completion_without_a_reward_moves_nothing():
    """It has no advantage, and the others are compared as if it were not there."""
    rewards = np.array([[1.0, NONE, 0, 2], [NONE] * 4, [NONE, 5, NONE, NONE]])
    got = advantages(rewards, "group")
    np.testing.assert_allclose(got[0], np.array([0, 0, -1, 1]) / (1 + 1e-4))
    np.testing.assert_array_equal(got[1:], 0)
    np.testing.assert_allclose(advantages(rewards, "none")[0], [0, 0, -1, 1])


def test_rewards_are_weighted_and_none_is_no_reward():
    table = np.array([[1, 2], [NONE, 2], [NONE, NONE]])
    np.testing.assert_array_equal(combined(table, [1.0, 0.5]), [2, 1, NONE])
    mean, deviation = moments(np.array([NONE, 1, 3]))
    np.testing.assert_allclose([mean[0], deviation[0]], [2, np.sqrt(2)])


def test_k3_is_the_divergence_on_average_and_never_negative():
    """Over all samples of p, weighted by p, it is KL(p || q)."""
    draw = np.random.default_rng(0)
    p, q = (np.log(draw.dirichlet(np.ones(9))) for _ in range(2))
    found = k3(jnp.float32(p), jnp.float32(q))
    assert (found >= 0).all()
    np.testing.assert_allclose((np.exp(p) * found).sum(), (np.exp(p) * (p - q)).sum(), rtol=1e-4)


def test_its_defaults_are_those_of_trl():
    config = OBJECTIVES["grpo"](settings("grpo", seq_len=512, batch_size=8)).config
    assert (config.beta, config.epsilon, config.loss_type) == (0.0, 0.2, "dapo")
    assert OBJECTIVES["dpo"](settings("dpo")).config.beta == 0.1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_generations": 4}, "6 completions, which num_generations=4 does not divide"),
        ({"max_completion_length": 8}, "max_completion_length is 8 and seq_len 8"),
        ({"save_every": 3, "num_iterations": 2}, "save_every is 3 and num_iterations 2"),
        ({"loss_type": "dap"}, "Unknown loss_type 'dap'. Did you mean 'dapo'?"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(more: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        objective(**more)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((4, 1, 8), "4 \\* 1 = 4 .* Raise batch_size to 8 or accumulation to 2, or .* to 4"),
        ((6, 2, 8), "6 \\* 2 = 12 .* Raise batch_size to 8 or accumulation to 4, or .* to 6"),
        ((1, 1, 2), r"Raise batch_size to 2 or accumulation to 2\.$"),
    ],
)
def test_a_step_without_whole_groups_says_what_to_raise_and_to_what(given, said):
    size = dict(zip(("batch_size", "accumulation", "num_generations"), given, strict=True))
    with pytest.raises(ConfigError, match=said):
        objective(**size)


def test_only_grpo_takes_a_beta_of_zero():
    with pytest.raises(ConfigError, match="beta is 0 for 'dpo'; expected more than 0"):
        OBJECTIVES["dpo"](settings("dpo", beta=0.0))
