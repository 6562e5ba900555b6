"""Objectives on preferences: values of TRL and of float64, known optima, meshes and micro-batches.

tests/data/objectives.json is what TRL 1.16's own loss functions make of these log-probabilities
(`conformance/make_objectives.py`).
"""

from __future__ import annotations

import json
import math
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_runs import Run, model, settings

from flaxen.core.errors import ConfigError, InputError
from flaxen.train import OBJECTIVES
from flaxen.train.objectives.dpo import LOSSES, SMOOTHED
from flaxen.train.objectives.kto import judged
from flaxen.train.objectives.preference import Pairs
from flaxen.train.objectives.reference_free import log1mexp

TRL = json.loads((golden.DATA / "objectives.json").read_text())
B = 3
PAIR = {"prompt": "a b", "chosen": "c d", "rejected": "user"}
OTHER = {"prompt": "b", "chosen": "d", "rejected": "a c b"}
THIRD = {"prompt": "c c", "chosen": "b a", "rejected": "b"}


def pairs() -> Pairs:
    each = lambda key: jnp.float32(TRL[key]).reshape(2, B)
    return Pairs(*each("policy"), *each("reference"), *each("lengths"), real=jnp.ones(B))


def objective(name: str, **more: Any) -> Any:
    return OBJECTIVES[name](settings(name, beta=TRL["beta"], **more))


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_against_a_reference_are_those_of_trl(kind: str):
    """TRL smooths `exo_pair` and `robust` alone."""
    eps = TRL["eps"] if kind in ("exo_pair", "robust") else 0.0
    mine = objective("dpo", loss_type=kind, dpo_label_smoothing=eps).losses(pairs())
    np.testing.assert_allclose(mine.mean(), TRL["dpo"][kind], rtol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_finite_differences(kind: str):
    eps = 0.1 if kind in SMOOTHED else 0.0
    given = pairs()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), given)
        total = lambda chosen: LOSSES[kind](wide._replace(chosen=chosen), 0.3, eps).sum()
        got = jax.grad(total)(wide.chosen)
        for i in range(B):
            move = 1e-5 * np.eye(B)[i]
            slope = (total(wide.chosen + move) - total(wide.chosen - move)) / 2e-5
            np.testing.assert_allclose(got[i], slope, atol=1e-7)


def test_smoothed_dpo_is_the_cross_entropy_with_turned_pairs():
    with_eps = objective("dpo", dpo_label_smoothing=0.1).losses(pairs())
    p = pairs()
    x = TRL["beta"] * np.float64((p.chosen - p.ref_chosen) - (p.rejected - p.ref_rejected))
    win = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(with_eps, -0.9 * np.log(win) - 0.1 * np.log(1 - win), rtol=1e-5)


def test_losses_without_a_reference_are_those_of_trl():
    """TRL's label_smoothing is 0.1 there, and cpo's likelihood of the chosen comes apart."""
    free = pairs()._replace(ref_chosen=jnp.zeros(B), ref_rejected=jnp.zeros(B))
    mean = free.chosen / free.chosen_length
    cpo = objective("cpo", dpo_label_smoothing=TRL["eps"], cpo_alpha=0.7).losses(free)
    np.testing.assert_allclose(cpo + 0.7 * mean, TRL["cpo"], rtol=1e-5)
    simpo = objective("simpo", dpo_label_smoothing=TRL["eps"], simpo_gamma=0.5).losses(free)
    np.testing.assert_allclose(simpo, TRL["simpo"], rtol=1e-5)
    orpo = objective("orpo").losses(free)
    np.testing.assert_allclose(orpo + mean, TRL["orpo"], rtol=1e-5)


def test_log1mexp_is_exact_on_either_side():
    x = np.array([-1e-6, -0.1, -0.69, -0.7, -5, -20], np.float64)
    np.testing.assert_allclose(log1mexp(jnp.float32(x)), np.log(-np.expm1(x)), rtol=1e-5)
    assert np.isfinite(jax.grad(log1mexp)(jnp.float32(0.0)))


def test_kto_is_that_of_trl():
    config = settings("kto", beta=TRL["beta"], desirable_weight=1.5, undesirable_weight=0.5)
    each = lambda key: jnp.float32(TRL[key])
    ratio, drift = each("policy") - each("reference"), each("drift") - each("ref_drift")
    losses, told = judged(ratio, drift, each("good") > 0, jnp.ones(6), config)
    # There the mismatched answers drift by 0.1 a token.
    np.testing.assert_allclose(told["kl"], TRL["kto"]["kl"], rtol=1e-4)
    np.testing.assert_allclose(losses.mean(), TRL["kto"]["loss"], rtol=1e-5)


def test_kto_has_no_gradient_through_its_kl():
    config, good = settings("kto"), jnp.array([True, False])
    ratio = jnp.array([1.0, 3.0])
    total = lambda drift: judged(ratio, drift, good, jnp.ones(2), config)[0].sum()
    assert total(jnp.zeros(2)) != total(jnp.ones(2))
    assert not jax.grad(total)(jnp.ones(2)).any()


def test_dpo_begins_at_log_two_and_tells_the_pair_apart():
    """The reference is the model without its adapters, so that the margin is 0 at first; its
    optimum is no loss at all.
    """
    run = Run("dpo", model(), PAIR, steps=60, beta=0.5, lora=4)
    first, last = run.row(0), run.row(-1)
    assert first["tokens"] == 1
    np.testing.assert_allclose(first["loss"], math.log(2), rtol=1e-5)
    assert last["loss"] < 0.01
    assert last["rewards/accuracies"] == 1
    margin = last["rewards/chosen"] - last["rewards/rejected"]
    np.testing.assert_allclose(last["rewards/margins"], margin, rtol=1e-4)
    before = model().parameters()
    for path, weight in run.weights().items():
        if path in before:
            np.testing.assert_array_equal(weight, before[path])


def test_smoothed_dpo_ends_at_the_entropy_of_its_smoothing():
    """-(1 - e) log s - e log(1 - s) is least at s = 1 - e, where it is H(e)."""
    eps = 0.2
    last = Run("dpo", model(), PAIR, steps=80, dpo_label_smoothing=eps, beta=0.5).row(-1)
    entropy = -eps * math.log(eps) - (1 - eps) * math.log(1 - eps)
    np.testing.assert_allclose(last["loss"], entropy, atol=1e-3)
    np.testing.assert_allclose(last["rewards/margins"], math.log(4), rtol=0.1)


def test_ipo_stops_at_its_margin():
    """The square is 0 where the mean log ratios are 1 / (2 beta) apart; both answers here have
    two tokens, their words and the EOS.
    """
    pair = {"prompt": "a b", "chosen": "c", "rejected": "d"}
    last = Run("ipo", model(), pair, steps=80, beta=0.5).row(-1)
    np.testing.assert_allclose(last["rewards/margins"] / 0.5 / 2, 1 / (2 * 0.5), rtol=0.03)
    assert last["loss"] < 1e-3


def test_simpo_and_orpo_tell_the_pair_apart_without_a_reference():
    """simpo's loss has no least value but 0; orpo's likelihood of the chosen goes to 1 besides."""
    simpo = Run("simpo", model(), PAIR, steps=60, beta=2.0, learning_rate=0.03).row(-1)
    assert simpo["loss"] < 0.01
    orpo = Run("orpo", model(), PAIR, steps=80).row(-1)
    assert orpo["logps/chosen"] > -0.1
    assert orpo["loss"] < 0.05


GOOD = {"prompt": "a b", "completion": "c d", "label": True}
BAD = {"prompt": "b", "completion": "user a", "label": False}


def test_kto_moves_good_answers_up_and_bad_ones_down():
    """At first each loss is 1 - sigmoid(0)."""
    run = Run("kto", model(), GOOD, BAD, steps=60, beta=0.5)
    np.testing.assert_allclose(run.rows[0]["loss"], 0.5, rtol=1e-5)
    last = run.row(-1)
    assert last["loss"] < 0.02
    assert last["rewards/accuracies"] == 1


def test_kto_compares_with_the_answer_of_the_row_before():
    """Rows (x1, y1), (x2, y2) with (x1, y2), (x2, y1)."""
    batch = Run("kto", model(), GOOD, BAD).source.batch_at(0)
    of = lambda key: {tuple(row[row != -100]) for row in batch[key][0]}
    assert of("targets") == of("kl_targets") == {(6, 7, 2), (3, 4, 2)}
    prompt = lambda row: tuple(row[: np.argmax(row == 2) - 2])
    for own, other in zip(batch["ids"][0], batch["kl_ids"][0], strict=True):
        assert prompt(own) == prompt(other)
        assert not np.array_equal(own, other)


def test_micro_batches_meshes_and_remat_change_nothing():
    """Three pairs as one batch of four rows, and as two uneven micro-batches on a mesh."""
    more = {"optimizer": "sgd", "learning_rate": 1.0, "beta": 0.5}
    fields = (PAIR, OTHER, THIRD)
    whole = Run("dpo", model(), *fields, batch_size=4, **more)
    want = whole.gradient()
    # The fourth row is empty, and counts for nothing.
    np.testing.assert_allclose(whole.rows[0]["loss"], math.log(2), rtol=1e-5)
    meshed = model(mesh="fsdp=2,dp=2")
    parts = Run("dpo", meshed, *fields, batch_size=2, accumulation=2, remat=True, **more)
    got = parts.gradient()
    assert int(whole.rows[0]["tokens"]) == int(parts.rows[0]["tokens"]) == 3
    np.testing.assert_allclose(parts.rows[0]["loss"], whole.rows[0]["loss"], rtol=1e-5)
    for path, change in want.items():
        np.testing.assert_allclose(got[path], change, atol=2e-5, err_msg=path)


def test_smoothing_where_there_is_none_is_refused():
    with pytest.raises(ConfigError, match="'hinge' does not have"):
        OBJECTIVES["dpo"](settings("dpo", loss_type="hinge", dpo_label_smoothing=0.1))
    with pytest.raises(ConfigError, match="infinite"):
        OBJECTIVES["dpo"](settings("dpo", loss_type="exo_pair"))
    with pytest.raises(ConfigError, match="Unknown loss_type 'sigmod'"):
        OBJECTIVES["dpo"](settings("dpo", loss_type="sigmod"))


def test_pairs_that_are_cut_to_nothing_are_refused():
    long = {"prompt": "a " * 20, "chosen": "b", "rejected": "c"}
    with pytest.raises(InputError, match="None of the 1 pairs"):
        Run("dpo", model(), long)
