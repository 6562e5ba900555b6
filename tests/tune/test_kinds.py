"""Kinds of adapters: starts, dropout, patterns, weights in full, over packed weights."""

from __future__ import annotations

import dataclasses

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_decoder import filled, logits, tiny

import flaxen
from flaxen.core.dot import dot
from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import combine, partition, paths
from flaxen.layers.linear import Linear
from flaxen.quantize import QuantizedWeight, RoundedWeight, rounded
from flaxen.train.optim import OPTIMIZERS
from flaxen.tune import (
    DoRA,
    LowRank,
    Replaced,
    adapters,
    add_lora,
    merge,
    trainable_paths,
    with_dropout,
    without_adapters,
)
from flaxen.tune.leaf import links, root

rng = np.random.default_rng(0)
W, A, B = (rng.normal(size=s) for s in ((6, 5), (2, 5), (6, 2)))
X, M = rng.normal(size=(7, 5)), rng.uniform(1, 2, 6)


def leaf(kind=LowRank, **more):
    arrays = {"weight": jnp.float32(W), "a": jnp.float32(A), "b": jnp.float32(B)}
    return kind(**arrays | more, scale=0.5)


def dora(**more):
    return leaf(DoRA, magnitude=jnp.float32(M), **more)


def lengths(v: np.ndarray) -> np.ndarray:
    return np.sqrt((v**2).sum(1))


def test_dora_is_the_papers_formula():
    v = W + 0.5 * B @ A
    whole = (M / lengths(v))[:, None] * v
    np.testing.assert_allclose(dot(jnp.float32(X), dora()), X @ whole.T, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(merge(Linear(weight=dora())).weight, whole, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(dora().rows(jnp.array([3, 0])), whole[[3, 0]], rtol=2e-5, atol=2e-5)


def test_the_length_of_dora_is_a_constant_to_gradients():
    """d/dB of sum(y) with |V| held: scale * (m / |V|) * outer(1, A x)."""
    grads = jax.grad(lambda one: dot(jnp.float32(X), one).sum())(dora())
    ratio = M / lengths(W + 0.5 * B @ A)
    want = 0.5 * ratio[:, None] * (X @ A.T).sum(0)
    np.testing.assert_allclose(grads.b, want, rtol=1e-4)
    y = X @ (W + 0.5 * B @ A).T
    np.testing.assert_allclose(grads.magnitude, y.sum(0) / lengths(W + 0.5 * B @ A), rtol=1e-4)


def test_dora_over_another_adapter_has_the_length_of_the_base():
    """As in PEFT: g * (W + L1 + L2), with g of W + L2."""
    first = leaf()
    second = dora(weight=first, b=jnp.float32(2 * B))
    ratio = M / lengths(W + B @ A)
    want = ratio[:, None] * (W + 1.5 * B @ A)
    np.testing.assert_allclose(dot(jnp.float32(X), second), X @ want.T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [leaf, dora])
def test_dropout_is_of_the_adapters_input_alone(kind):
    key = jax.random.key(3)
    one = kind(dropout=0.5, key=key)
    kept = np.asarray(jax.random.bernoulli(key, 0.5, X.shape))
    dropped = np.where(kept, X / 0.5, 0)
    low = 0.5 * dropped @ A.T @ B.T
    if isinstance(one, DoRA):
        ratio = M / lengths(W + 0.5 * B @ A)
        want = X @ W.T + (ratio - 1) * (dropped @ W.T) + ratio * low
    else:
        want = X @ W.T + low
    np.testing.assert_allclose(dot(jnp.float32(X), one), want, rtol=2e-5, atol=3e-5)
    without = dataclasses.replace(one, key=None)
    np.testing.assert_array_equal(dot(jnp.float32(X), without), dot(jnp.float32(X), kind()))


def test_dropout_needs_a_key_and_differs_by_layer():
    model = tiny()
    tree = add_lora(model.module, rank=2, dropout=0.3, targets=("q_proj", "k_proj"))
    tree = jax.tree.map(lambda x: x + 0.05, tree)
    still = logits(model, tree)
    keyed = with_dropout(tree, jax.random.key(0))
    keys = jax.random.key_data(keyed.layers.body[0].self_attn.q_proj.weight.key)
    other = jax.random.key_data(keyed.layers.body[0].self_attn.k_proj.weight.key)
    assert len({tuple(k) for k in np.concatenate([keys, other]).tolist()}) == 4
    assert np.abs(logits(model, keyed) - still).max() > 1e-3
    np.testing.assert_array_equal(logits(model, with_dropout(keyed, None)), still)


@pytest.mark.parametrize(("init", "std"), [("gaussian", 1 / 4), ("kaiming", (3 * 64) ** -0.5)])
def test_starts_have_pefts_spread(init, std):
    tree = add_lora(tiny(folded=False).module, rank=4, init=init, targets=("q_proj",))
    a = np.asarray(tree.layers[0].self_attn.q_proj.weight.a)
    assert a.std() == pytest.approx(std, rel=0.15)
    assert not np.asarray(tree.layers[0].self_attn.q_proj.weight.b).any()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_8"])
def test_pissa_starts_from_the_largest_singular_values(init):
    """The trained part is the best approximation of that rank, and the model computes the same."""
    model = tiny()
    tree = add_lora(model.module, rank=4, alpha=8, init=init, targets=("q_proj",))
    back, trained = links(tree.layers.body[0].self_attn.q_proj.weight)
    weight = np.asarray(root(trained)[0], np.float64).reshape(64, 64)
    u, s, vt = np.linalg.svd(weight)
    b, a = np.asarray(trained.b[0]).reshape(64, 4), np.asarray(trained.a[0])
    best = (u[:, :4] * s[:4]) @ vt[:4]
    np.testing.assert_allclose(2 * b @ a, best, atol=1e-4 if init == "pissa" else 2e-2)
    np.testing.assert_allclose(logits(model, tree), logits(model, model.module), atol=2e-5)
    assert trainable_paths(tree) == {
        "layers.body.0.self_attn.q_proj.weight.a",
        "layers.body.0.self_attn.q_proj.weight.b",
    }
    assert back.frozen


def test_patterns_set_rank_and_scale_by_name():
    tree = add_lora(
        tiny(folded=False).module,
        rank=4,
        alpha=8,
        rank_pattern={"k_proj": 2, r"layers\.1\.mlp\..*": 3},
        alpha_pattern={"0.self_attn.q_proj": 32},
    )
    found = adapters(tree)
    ranks = {path.removeprefix("layers."): (x.rank, x.scale) for path, x in found.items()}
    assert ranks["0.self_attn.k_proj.weight"] == (2, 4)
    assert ranks["1.mlp.up_proj.weight"] == (3, 8 / 3)
    assert ranks["0.mlp.up_proj.weight"] == (4, 2)
    assert ranks["0.self_attn.q_proj.weight"] == (4, 8)
    assert ranks["1.self_attn.q_proj.weight"] == (4, 2)


def test_layers_left_out_of_a_stack_never_learn():
    model = tiny()
    tree = add_lora(model.module, rank=4, layers_to_transform=[1], targets=("q_proj",))
    one = tree.layers.body[0].self_attn.q_proj.weight
    assert not np.asarray(one.a[0]).any()
    assert np.asarray(one.a[1]).any()

    def total(link):
        first = jax.tree.map(lambda x: x[0], link)
        return jnp.square(dot(jnp.ones((2, 64)), first)).sum()

    grads = jax.grad(total)(one)
    assert not np.asarray(grads.a).any()
    assert not np.asarray(grads.b).any()


def test_all_linear_leaves_the_head():
    paths_ = set(adapters(add_lora(tiny(folded=False).module, targets="all-linear")))
    assert len(paths_) == 14
    assert not any("lm_head" in path for path in paths_)


def test_a_head_is_trained_in_full_and_the_base_stays():
    model = tiny()
    tree = add_lora(model.module, targets=("q_proj",), modules_to_save=("lm_head",))
    assert "lm_head.weight.value" in trainable_paths(tree)
    np.testing.assert_array_equal(logits(model, tree), logits(model, model.module))
    head = dataclasses.replace(tree.lm_head.weight, value=2 * tree.lm_head.weight.value)
    doubled = dataclasses.replace(tree, lm_head=dataclasses.replace(tree.lm_head, weight=head))
    np.testing.assert_allclose(
        logits(model, merge(doubled)), 2 * logits(model, model.module), rtol=1e-5
    )
    assert without_adapters(doubled).lm_head.weight is model.module.lm_head.weight
    assert isinstance(head, Replaced)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modules_to_save": ("lm_heat",)}, "no head or table 'lm_heat'.*Did you mean"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"rank": 0}, "rank is 0; expected a whole number of at least 1"),
        ({"rank": -4}, "rank is -4"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"rank": 10**9}, r"_proj would have rank 1000000000, .* is \d+ x \d+; "),
        ({"rank_pattern": {"down_proj": 97}}, r"down_proj .* rank 97, but its weight is 64 x 96"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
        ({"rank_pattern": {"q_porj": 2}}, "'q_porj' ends the path .* Did you mean 'q_proj'"),
        ({"alpha": 0}, "alpha is 0; expected a number above 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha_pattern": {"q_proj": -1.0}}, r"alpha_pattern\['q_proj'\] is -1.0"),
        ({"layers_to_transform": [0, 7]}, "names layer 7, .* in the layers 0, 1"),
        ({"init": "loftq"}, "init is 'loftq'; expected normal"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"alpha_pattern": {"0.self_attn.q_proj": 3}}, "scan_layers=False"),
        ({"layers_to_transform": 0, "use_dora": True}, "scan_layers=False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        add_lora(tiny().module, **settings)


def test_a_rank_may_be_all_that_the_longer_side_has():
    adapted = add_lora(tiny().module, rank=96, targets=("down_proj",))
    assert {leaf.rank for leaf in adapters(adapted).values()} == {96}


def test_a_tied_table_is_not_trained_alone():
    with pytest.raises(ConfigError, match="shares its weight"):
        add_lora(tiny("gemma3_text").module, modules_to_save=("embed_tokens",))


@pytest.mark.parametrize(("bits", "use_dora"), [(8, False), (4, True)])
def test_adapters_over_rounded_weights(bits, use_dora):
    """Gradients and optimiser state are the adapters' alone; merging gives W' + the change."""
    base = rounded(tiny().module, bits)
    tree = add_lora(base, rank=4, use_dora=use_dora, targets=("q_proj", "down_proj"))
    np.testing.assert_allclose(_seen(tree), _seen(base), rtol=1e-4, atol=1e-4)
    tree = jax.tree.map(lambda x: x + 0.02 if x.dtype == jnp.float32 else x, tree)
    merged = merge(tree)
    assert not isinstance(merged.layers.body[0].self_attn.q_proj.weight, QuantizedWeight)
    np.testing.assert_allclose(_seen(merged), _seen(tree), rtol=1e-4, atol=1e-4)
    wanted = trainable_paths(tree)
    trained, frozen = partition(tree, lambda path, _: path in wanted)
    assert len(jax.tree.leaves(trained)) == 2 * (3 if use_dora else 2)
    grads = jax.grad(lambda x: jnp.square(_seen(combine(x, frozen))).sum())(trained)
    assert all(np.isfinite(g).all() and np.asarray(g).any() for g in jax.tree.leaves(grads))
    held = root(tree.layers.body[0].self_attn.q_proj.weight)
    assert isinstance(held, RoundedWeight)
    state = OPTIMIZERS["adamw"](_Betas(), trained).init(trained)
    count = sum(x.size for x in jax.tree.leaves(trained))
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * count + 1


class _Betas:
    beta1, beta2, eps = 0.9, 0.99, 1e-8


@jax.jit
def _seen(tree):
    """What the adapted projections of the first layer make of two rows."""
    one = jax.tree.map(lambda x: x[0], tree.layers.body[0])
    x = jnp.linspace(-1, 1, 128).reshape(2, 64)
    y = one.self_attn.q_proj(x).reshape(2, -1)
    return jnp.concatenate([y, one.mlp.down_proj(jnp.linspace(0, 1, 192).reshape(2, 96))], -1)


def test_lengths_and_full_weights_are_cut_like_their_weight():
    tree = add_lora(
        tiny(mesh="tp=2,fsdp=4").module,
        targets=("q_proj",),
        use_dora=True,
        modules_to_save=("lm_head",),
    )
    q = tree.layers.body[0].self_attn.q_proj.weight
    assert q.magnitude.sharding.spec == P(None, "tp", None)
    head = tree.lm_head.weight
    assert head.value.sharding == head.weight.sharding
    assert paths(tree)["lm_head.weight.value"].shape == head.shape


def test_a_training_call_of_a_model_drops_inputs_of_adapters(tmp_path):
    base = golden.write_folder(golden.case("llama"), tmp_path)
    grown = flaxen.load(base).add_adapter(rank=2, dropout=0.5, targets=("q_proj",))
    grown = grown.replace(module=filled(grown.module))
    ids = golden.case("llama").arrays["full_input_ids"][:1]
    still = grown(ids).logits
    dropped = grown(ids, train=True, dropout_rng=jax.random.key(0)).logits
    assert np.abs(dropped - still).max() > 1e-3
    with pytest.raises(InputError, match="dropout_rng"):
        grown(ids, train=True)
