"""Routers against plain NumPy, a token at a time in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.layers import routers

E, D, K = 8, 6, 3


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, SHIFT = draw(2, 5, D), draw(E, D, seed=1), draw(E, seed=2)
GROUPS = {"groups": 4, "best": 2, "scale": 1.5}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def largest(x: np.ndarray, k: int = K) -> np.ndarray:
    return np.argsort(-x, kind="stable")[:k]


def of_chosen(logits):
    chosen = largest(logits + SHIFT)
    return softmax((logits + SHIFT)[chosen]), chosen


def own_sigmoid(logits):
    chosen = largest(logits)
    return sigmoid(logits[chosen]), chosen


def left(ranked, by, instead):
    """Scores without those of the two groups of four that are worst."""
    groups = ranked.reshape(4, 2)
    ranks = np.sort(groups)[:, ::-1][:, :by].sum(1)
    keep = np.isin(np.arange(4), largest(ranks, 2))
    return np.where(keep[:, None], groups, instead).reshape(E)


def grouped(logits):
    scores = softmax(logits)
    chosen = largest(left(scores, 1, 0.0))
    return scores[chosen] * 1.5, chosen


def corrected(logits):
    scores = sigmoid(logits)
    chosen = largest(left(scores + SHIFT, 2, -np.inf))
    return scores[chosen] * 1.5, chosen


def normalised(logits):
    weights, chosen = corrected(logits)
    return weights / weights.sum() * 1.5, chosen


def corrected_softmax(logits):
    scores = softmax(logits)
    chosen = largest(scores + SHIFT)
    return scores[chosen] / max(scores[chosen].sum(), 0.5), chosen


def sparse_mixer(logits):
    first = int(logits.argmax())
    near = (logits[first] - logits) / np.maximum(abs(logits), logits[first]) <= 1.0
    weight = softmax(np.where(near, logits, -np.inf))[first]
    rest = np.where(np.arange(E) == first, -np.inf, logits)
    second = int(rest.argmax())
    near = (rest[second] - logits) / np.maximum(abs(logits), rest[second]) <= 1.0
    other = softmax(np.where(near, rest, -np.inf))[second]
    return np.array([weight, other]), np.array([first, second])


CORRECTION = {"e_score_correction_bias": SHIFT}
CASES = {
    "RouterOfChosen": (of_chosen, {"bias": SHIFT}),
    "SigmoidRouter": (own_sigmoid, {}),
    "GroupedRouter": (grouped, GROUPS),
    "CorrectedRouter": (corrected, GROUPS | CORRECTION),
    "NormalisedCorrectedRouter": (normalised, GROUPS | CORRECTION),
    "CorrectedSoftmaxRouter": (corrected_softmax, {"least": 0.5} | CORRECTION),
    "SparseMixer": (sparse_mixer, {"jitter": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_router_chooses_and_weighs_as_its_paper_says(name):
    by_hand, slots = CASES[name]
    k = 2 if name == "SparseMixer" else K
    weights, chosen = getattr(routers, name)(weight=W, k=k, **slots)(jnp.asarray(X))
    assert weights.dtype == jnp.float32
    for at in np.ndindex(X.shape[:2]):
        want, experts = by_hand(W.astype(float) @ X[at].astype(float))
        np.testing.assert_array_equal(chosen[at], experts)
        np.testing.assert_allclose(weights[at], want, rtol=1e-5)


def test_nothing_learns_a_correction():
    def total(shift):
        slots = GROUPS | {"e_score_correction_bias": shift}
        return routers.CorrectedRouter(weight=W, k=K, **slots)(jnp.asarray(X))[0].sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(SHIFT)), 0)


def test_scores_below_zero_and_a_lonely_expert_have_gradients():
    """One expert far above all others: nothing else is near it."""
    weight = jnp.asarray(W).at[0].set(0).at[0, 0].set(100)
    x = jnp.ones((1, 1, D))

    def first(weight):
        return routers.SparseMixer(weight=weight, k=2, jitter=0.01)(x)[0][0, 0, 0]

    value, grad = jax.value_and_grad(first)(weight)
    assert value == 1
    assert np.isfinite(grad).all()
