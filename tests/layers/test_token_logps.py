"""Log-probabilities of tokens against float64 NumPy, gradients included."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_decoder import filled, logits, tiny

from flaxen.layers.cross_entropy import Scoring
from flaxen.layers.token_logps import token_logps
from flaxen.models.causal import whole_context
from flaxen.tune import add_lora

ROWS, V, D = 11, 9, 6
TARGETS = np.array([3, -100, 0, 8, 7, 7, -100, 1, 2, 5, 8])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


PULL, PULL_H = draw(ROWS, seed=5), draw(ROWS, seed=6)
"""The cotangents of each row's log p and entropy."""


def exact(x, weight, bias, scoring, temperature):
    """log p and entropy of each row in float64, and the gradient of their sum weighted by PULL and
    PULL_H: d log p_y / d z = (hot - p) / t, d H / d z = -p (log p + H) / t.
    """
    raw = (x @ weight.T + bias) * scoring.scale
    cap = scoring.softcap
    z = (cap * np.tanh(raw / cap) if cap else raw) / temperature
    inner = (1 - np.tanh(raw / cap) ** 2 if cap else 1) * scoring.scale / temperature
    logps = z - np.log(np.exp(z).sum(-1, keepdims=True))
    p, kept = np.exp(logps), TARGETS != -100
    entropy = -(p * logps).sum(-1)
    hot = np.eye(V)[np.where(kept, TARGETS, 0)]
    slope = PULL[:, None] * (hot - p) - PULL_H[:, None] * p * (logps + entropy[:, None])
    slope = slope * kept[:, None] * inner
    return (logps * hot).sum(-1) * kept, entropy * kept, slope @ weight, slope.T @ x, slope.sum(0)


def pulled(x, weight, bias, **how):
    """The same of ours, in the same order."""

    def total(x, weight, bias):
        logps, entropy = token_logps(
            x, weight, jnp.asarray(TARGETS), bias=bias, entropy=True, **how
        )
        return jnp.sum(logps * PULL + entropy * PULL_H), (logps, entropy)

    (_, told), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weight, bias)
    return *told, *grads


OPERANDS = draw(ROWS, D), draw(V, D, seed=1), draw(V, seed=2)


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize(
    ("scoring", "temperature"), [(Scoring(), 1.0), (Scoring(softcap=2.0, scale=0.5), 0.7)]
)
def test_values_and_gradients_agree_with_float64(chunk, scoring, temperature):
    how = {"scoring": scoring, "temperature": temperature}
    got = pulled(*map(jnp.float32, OPERANDS), chunk=chunk, **how)
    for mine, truth in zip(got, exact(*OPERANDS, **how), strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6, rtol=5e-6)


def test_columns_of_no_token_have_no_part():
    x, weight, bias = OPERANDS
    wide = np.concatenate([weight, draw(3, D, seed=3)]), np.concatenate([bias, draw(3, seed=4)])
    got = pulled(jnp.float32(x), *map(jnp.float32, wide), scoring=Scoring(vocab=V), chunk=4)
    logps, entropy, dx, dw, db = exact(*OPERANDS, Scoring(), 1.0)
    wanted = logps, entropy, dx, np.pad(dw, [(0, 3), (0, 0)]), np.pad(db, (0, 3))
    for mine, truth in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6, rtol=5e-6)


def test_sharded_operands_give_the_same():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, weight, bias = OPERANDS
    place = lambda a, *spec: jax.device_put(jnp.float32(a), NamedSharding(mesh, P(*spec)))
    got = jax.jit(lambda *operands: pulled(*operands, chunk=4))(
        place(x), place(weight, None, "a"), place(bias)
    )
    for mine, truth in zip(got, exact(*OPERANDS, Scoring(), 1.0), strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6, rtol=5e-6)


def test_the_scores_of_all_rows_are_never_held():
    rows, width = 64, 512
    targets = jnp.zeros(rows, jnp.int32)

    def total(x, weight):
        logps, entropy = token_logps(x, weight, targets, entropy=True, chunk=8)
        return jnp.sum(logps * logps + entropy)

    shapes = [jax.ShapeDtypeStruct((n, 4), jnp.float32) for n in (rows, width)]
    text = jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile().as_text()
    found = re.findall(r"\w+\[([\d,]+)\]", text)
    assert max(math.prod(map(int, shape.split(","))) for shape in found) < rows * width


@pytest.mark.exhaustive
@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "lm_head")])
def test_a_model_with_adapters_tells_what_its_logits_do(targets):
    """On its projections, and on the head itself."""
    model = tiny("llama", folded=False)
    module = filled(add_lora(model.module, rank=2, targets=targets))
    from golden import case

    ids = jnp.asarray(case("llama").arrays["full_input_ids"])
    labels = jnp.roll(ids, -1, 1).at[:, -1].set(-100)
    ctx = whole_context(module, ids.shape, model.runtime)
    got = module.logps(ids, labels, ctx)[0]
    scores = np.asarray(logits(model, module), np.float64)
    truth = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    want = np.take_along_axis(truth, np.maximum(labels, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, want * (np.asarray(labels) != -100), atol=1e-4)
