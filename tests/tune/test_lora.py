"""Low-rank adapters start as nothing, merge into what they computed, leave the base alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_decoder import filled, logits, tiny

from flaxen.core.dot import WeightLeaf, dot, rows
from flaxen.core.errors import ConfigError
from flaxen.core.tree import paths
from flaxen.layers.linear import Linear
from flaxen.tune import LowRank, adapters, add_lora, merge
from flaxen.tune.lora import scale_of


@pytest.mark.parametrize("folded", [False, True])
def test_a_fresh_adapter_changes_nothing(folded: bool):
    model = tiny(folded=folded)
    adapted = add_lora(model.module, rank=4)
    assert len(adapters(adapted)) == 7 * (1 if folded else 2)
    np.testing.assert_array_equal(logits(model, adapted), logits(model, model.module))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param("gemma3_text", None, marks=pytest.mark.exhaustive), ("llama", "tp=2,fsdp=4")],
)
def test_merged_logits_are_the_adapters_logits(name: str, mesh: str | None):
    model = tiny(name, mesh=mesh)
    with jax.default_matmul_precision("highest"):
        adapted = filled(add_lora(model.module, rank=4, alpha=8))
        want, got = logits(model, adapted), logits(model, merge(adapted))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(want - logits(model, model.module)).max() > 1e-2


def test_merge_is_w_plus_scale_b_a_cast_once():
    w = jnp.asarray(np.linspace(-1, 1, 24).reshape(2, 3, 4), jnp.bfloat16)
    a, b = np.full((4, 4), 0.5, np.float32), np.full((2, 3, 4), 0.001, np.float32)
    leaf = LowRank(weight=w, a=jnp.asarray(a), b=jnp.asarray(b), scale=scale_of(4, 8))
    merged = merge(Linear(weight=leaf)).weight
    exact = np.asarray(w, np.float64) + 2 * np.einsum("nhr,rd->nhd", b, a)
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged, exact.astype(np.float32).astype(jnp.bfloat16))


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert scale_of(4, 8) == 2
    assert scale_of(4, 8, rank_stabilised=True) == 4
    for stabilised, scale in ((False, 2), (True, 4)):
        adapted = add_lora(tiny().module, rank=4, alpha=8, rank_stabilised=stabilised)
        assert {leaf.scale for leaf in adapters(adapted).values()} == {scale}


def test_a_second_merge_is_refused():
    merged = merge(add_lora(tiny().module))
    with pytest.raises(ConfigError, match="no adapters to merge"):
        merge(merged)


def test_adapters_are_not_stacked_on_adapters():
    with pytest.raises(ConfigError, match="merge them"):
        add_lora(add_lora(tiny().module))


def test_the_base_is_untouched_by_adapting_and_merging():
    model = tiny()
    before = {path: np.array(leaf) for path, leaf in paths(model.module).items()}
    merge(filled(add_lora(model.module)))
    for path, leaf in paths(model.module).items():
        np.testing.assert_array_equal(leaf, before[path])


def test_an_unknown_target_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"'q_porj' matches no projection. Did you mean 'q_proj'"):
        add_lora(tiny().module, targets=("q_porj", "v_proj"))
    with pytest.raises(ConfigError, match="matches the whole path of no projection"):
        add_lora(tiny().module, targets="q_proj")


def test_a_regular_expression_chooses_by_path():
    adapted = add_lora(tiny(folded=False).module, targets=r"layers\.1\..*\.(q|v)_proj")
    assert set(adapters(adapted)) == {
        "layers.1.self_attn.q_proj.weight",
        "layers.1.self_attn.v_proj.weight",
    }


def test_adapters_are_cut_like_their_weight():
    adapted = add_lora(tiny(mesh="tp=2,fsdp=4").module, rank=4)
    attn = adapted.layers.body[0].self_attn
    # heads are cut by tp, embed by fsdp; the rank is whole.
    assert attn.q_proj.weight.a.sharding.spec == P(None, None, "fsdp")
    assert attn.q_proj.weight.b.sharding.spec == P(None, "tp", None, None)
    assert attn.o_proj.weight.a.sharding.spec == P(None, None, "tp", None)
    assert attn.o_proj.weight.b.sharding.spec == P(None, "fsdp", None)


def test_a_low_rank_leaf_is_a_weight():
    a, b, w = (
        np.random.default_rng(i).normal(size=s) for i, s in enumerate([(2, 5), (7, 2), (7, 5)])
    )
    leaf = LowRank(weight=jnp.float32(w), a=jnp.float32(a), b=jnp.float32(b), scale=0.5)
    assert isinstance(leaf, WeightLeaf)
    assert leaf.shape == (7, 5)
    whole, x = w + 0.5 * b @ a, np.random.default_rng(9).normal(size=(3, 5))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(dot(jnp.float32(x), leaf), x @ whole.T, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            rows(leaf, jnp.array([6, 0])), whole[[6, 0]], rtol=1e-5, atol=1e-6
        )
