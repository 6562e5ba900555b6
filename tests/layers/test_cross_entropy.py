"""The fused loss against float64 NumPy, gradients included."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.layers.cross_entropy import linear_cross_entropy
from flaxen.pretrained import from_config


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def exact(x, weight, labels, softcap=None, scale=1.0):
    """Loss, count, and gradients of the loss, row by row in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    raw = x @ weight.T * scale
    logits = softcap * np.tanh(raw / softcap) if softcap else raw
    inner = 1 - np.tanh(raw / softcap) ** 2 if softcap else np.ones_like(raw)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    kept = labels != -100
    hot = np.eye(weight.shape[0])[np.where(kept, labels, 0)]
    loss = ((log_z - (logits * hot).sum(-1)) * kept).sum()
    slope = (np.exp(logits - log_z[:, None]) - hot) * kept[:, None] * inner * scale
    return loss, kept.sum(), slope @ weight, slope.T @ x


@functools.partial(jax.jit, static_argnames=("softcap", "scale", "chunk"))
def fused(x, weight, labels, **how):
    (loss, count), grads = jax.value_and_grad(linear_cross_entropy, (0, 1), has_aux=True)(
        x, weight, labels, **how
    )
    return loss, count, *grads


LABELS = np.array([3, -100, 0, 10, 7, 7, -100, 1, 2, 5, 10])


@pytest.mark.parametrize(("rows", "chunk"), [(1, 256), (2, 1), (11, 4), (11, 256)])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 0.5)])
def test_loss_and_gradients_agree_with_float64(rows, chunk, softcap, scale):
    x, weight, labels = draw(rows, 6), draw(11, 6, seed=1), LABELS[:rows]
    how = {"softcap": softcap, "scale": scale}
    got = fused(jnp.float32(x), jnp.float32(weight), labels, chunk=chunk, **how)
    for mine, truth in zip(got, exact(x, weight, labels, **how), strict=True):
        np.testing.assert_allclose(mine, truth, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_lose_only_their_own_rounding(dtype):
    x, weight = jnp.asarray(draw(11, 6), dtype), jnp.asarray(draw(11, 6, seed=1), dtype)
    got = fused(x, weight, LABELS, chunk=4)
    assert got[0].dtype == jnp.float32
    assert got[2].dtype == got[3].dtype == x.dtype
    truth = exact(x, weight, LABELS)
    np.testing.assert_allclose(got[0], truth[0], rtol=1e-5)
    for mine, want in zip(got[2:], truth[2:], strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), want, atol=2e-2)


def test_float64_is_kept_in_the_gradients():
    with jax.enable_x64(True):
        x, weight = draw(11, 6), draw(11, 6, seed=1)
        got = fused(jnp.asarray(x), jnp.asarray(weight), LABELS, chunk=4)
        for mine, want in zip(got[2:], exact(x, weight, LABELS)[2:], strict=True):
            np.testing.assert_allclose(mine, want, atol=1e-13)


def test_nothing_to_learn_from_is_zero_not_nan():
    labels = np.full(5, -100)
    loss, count, dx, dw = fused(jnp.ones((5, 6)), jnp.ones((11, 6)), labels, chunk=2)
    assert loss == 0
    assert count == 0
    assert not dx.any()
    assert not dw.any()


def test_large_logits_stay_finite():
    x, weight = 1e3 * draw(11, 6), draw(11, 6, seed=1)
    loss, _, dx, _ = fused(jnp.float32(x), jnp.float32(weight), LABELS, chunk=4)
    np.testing.assert_allclose(loss, exact(x, weight, LABELS)[0], rtol=1e-5)
    assert np.isfinite(dx).all()


def test_several_embedding_axes_are_contracted():
    x, weight = draw(5, 2, 3), draw(11, 2, 3, seed=1)
    loss, _ = linear_cross_entropy(
        jnp.float32(x), jnp.float32(weight), jnp.asarray(LABELS[:5]), contract=2
    )
    flat = exact(x.reshape(5, 6), weight.reshape(11, 6), LABELS[:5])
    np.testing.assert_allclose(loss, flat[0], rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """A weight leaf with an integer part: `codes * step`."""

    codes: jax.Array
    step: jax.Array

    @property
    def shape(self):
        return self.codes.shape

    def dot(self, x, contract):
        return x @ (self.codes * self.step).T

    def rows(self, ids):
        return self.codes[ids] * self.step


def test_a_leaf_type_gets_gradients_for_its_own_parts():
    codes, step = np.arange(66).reshape(11, 6) % 7 - 3, np.full((11, 1), 0.5)
    x = draw(11, 6)
    leaf = Steps(jnp.asarray(codes), jnp.float32(step))
    loss, grad = jax.value_and_grad(
        lambda leaf: linear_cross_entropy(jnp.float32(x), leaf, jnp.asarray(LABELS), chunk=4)[0],
        allow_int=True,
    )(leaf)
    truth = exact(x, codes * step, LABELS)
    np.testing.assert_allclose(loss, truth[0], rtol=1e-5)
    np.testing.assert_allclose(grad.step[:, 0], (truth[3] * codes).sum(-1), atol=1e-5)
    assert grad.codes.dtype == jax.dtypes.float0


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None), P(None, "b")])
def test_sharded_operands_give_the_same(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, weight, labels = draw(16, 8), draw(12, 8, seed=1), np.resize(LABELS, 16)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    got = fused(
        place(jnp.float32(x), P("a", None)),
        place(jnp.float32(weight), spec),
        place(labels, P("a")),
        chunk=4,
    )
    for mine, want in zip(got, exact(x, weight, labels), strict=True):
        np.testing.assert_allclose(mine, want, atol=3e-6, rtol=3e-6)


def test_the_logits_of_all_rows_are_never_held():
    shapes = jax.ShapeDtypeStruct((64, 4), jnp.float32), jax.ShapeDtypeStruct((512, 4), jnp.float32)
    labels = jnp.zeros(64, jnp.int32)
    grad = jax.grad(lambda x, w: linear_cross_entropy(x, w, labels, chunk=8)[0], (0, 1))
    temp = jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert temp < 64 * 512 * 4


def test_training_a_model_never_holds_its_logits():
    """No value of its compiled gradient has an element for every token of the vocabulary in every
    slot, and without the loss in pieces there is one.
    """
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 1, "head_dim": 8}
    config = {"model_type": "llama", "vocab_size": 640, "num_hidden_layers": 1, **sizes}
    model, ids = from_config(config | {"num_key_value_heads": 1}), np.zeros((2, 256), np.int32)
    whole = ids.size * 640

    def largest(loss):
        text = jax.jit(jax.grad(loss)).lower(model).compile().as_text()
        shapes = re.findall(r"\w+\[([\d,]+)\]", text)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest(lambda model: model.loss(ids, ids)) < whole
    assert largest(lambda model: model(ids, labels=ids).loss) >= whole


def test_a_bias_and_padding_columns():
    x, weight, bias = draw(11, 6), draw(11, 6, seed=1), draw(11, seed=2)
    wide = np.concatenate([weight, draw(3, 6, seed=3)]), np.concatenate([bias, draw(3, seed=4)])

    def loss(x, weight, bias):
        return linear_cross_entropy(x, weight, jnp.asarray(LABELS), bias=bias, vocab=11, chunk=4)[0]

    got = jax.value_and_grad(loss, (0, 1, 2))(jnp.float32(x), *map(jnp.float32, wide))
    # A bias is one more input that is always one.
    truth = exact(np.c_[x, np.ones(11)], np.c_[weight, bias], LABELS)
    np.testing.assert_allclose(got[0], truth[0], rtol=1e-5)
    dx, dw, db = got[1]
    np.testing.assert_allclose(dx, truth[2][:, :6], atol=1e-5)
    np.testing.assert_allclose(np.c_[dw, db][:11], truth[3], atol=1e-5)
    assert not np.asarray(dw)[11:].any()
    assert not np.asarray(db)[11:].any()


@pytest.mark.parametrize("vocab", [None, 11])
def test_smoothing_and_z_loss_agree_with_float64(vocab):
    """(1 - e) * -log p + e * mean of -log p over the vocabulary, + z * (log of the sum)^2."""
    e, z, size = 0.1, 0.01, 11
    x, labels = draw(11, 6), LABELS
    weight = draw(size + (2 if vocab else 0), 6, seed=1)  # rows from `vocab` on are no tokens

    def loss(x, weight):
        logits = x @ weight[:size].T
        top = logits.max(-1, keepdims=True)
        log_z = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
        logp = logits - log_z[:, None]
        kept = labels != -100
        hot = jnp.eye(size)[np.where(kept, labels, 0)]
        each = -((1 - e) * (logp * hot).sum(-1) + e * logp.mean(-1)) + z * log_z**2
        return (each * kept).sum()

    with jax.enable_x64(True):
        want = [np.asarray(t) for t in jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(x, weight))]
    how = {"label_smoothing": e, "z_loss": z, "vocab": vocab, "chunk": 4}
    run = functools.partial(linear_cross_entropy, **how)
    (got, count), grads = jax.value_and_grad(run, (0, 1), has_aux=True)(
        jnp.float32(x), jnp.float32(weight), labels
    )
    assert count == 9
    for mine, truth in zip((got, *grads), want, strict=True):
        np.testing.assert_allclose(mine, truth, atol=3e-6, rtol=3e-6)
