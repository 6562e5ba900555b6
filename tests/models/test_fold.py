"""Where equal layers are folded, and that nothing depends on it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import flaxen
from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.runtime import PLAIN
from flaxen.models.causal import forward, mean_loss
from flaxen.models.fold import Folded, folded, repetition, stack_params, unfold
from flaxen.pretrained import from_config
from flaxen.tune import add_lora, load_adapter, save_adapter

MIXED = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
SHARED = [key for key in MIXED if "expert" not in key and "sparse" not in key and "mlp_" not in key]
IDS = np.arange(8, dtype=np.int32).reshape(2, 4)


@pytest.fixture(scope="module")
def models():
    return [from_config(MIXED, scan_layers=scan) for scan in (False, True)]


@pytest.mark.parametrize(
    ("kinds", "where"),
    [
        ("AAAA", (0, 1, 4)),
        ("DMMM", (1, 1, 3)),
        ("DDMMMMF", (2, 1, 4)),
        ("SSSSSFSSSSSFSS", (0, 6, 2)),
        ("XSFSFSFY", (1, 2, 3)),
        ("AAABBBBB", (3, 1, 5)),
        ("ABC", (0, 3, 1)),
        ("A", (0, 1, 1)),
        ("", (0, 1, 1)),
    ],
)
def test_the_fold_leaves_the_fewest_layers_apart(kinds, where):
    assert repetition(kinds) == where


def test_the_fold_is_as_good_as_any():
    rng = np.random.default_rng(0)
    for _ in range(60):
        kinds = [int(k) for k in rng.integers(0, 2, rng.integers(1, 9))]
        n, (head, period, count) = len(kinds), repetition(kinds)
        turns = [kinds[head + i * period :][:period] for i in range(count)]
        assert all(turn == turns[0] for turn in turns)
        saved = [
            p * (c - 1)
            for p in range(1, n + 1)
            for c in range(1, n // p + 1)
            for h in range(n - p * c + 1)
            if kinds[h : h + p] * c == kinds[h : h + p * c]
        ]
        assert period * (count - 1) == max(saved)


def test_a_dense_first_layer_stands_before_the_folded_mixtures(models):
    layers = models[1].module.layers
    assert (len(layers.head), len(layers.body), layers.count, len(layers.tail)) == (1, 1, 3, 0)
    assert len(layers) == 4
    for mine, plain in zip(unfold(layers, lambda w, i: w[i]), models[0].module.layers, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, plain)


def test_every_layer_has_one_place():
    layers = Folded(head=["D"], body=["S", "F"], tail=["S"], count=3)
    places = [("head", 0), ("body", 0), ("body", 1), ("tail", 0)]
    assert [layers.indices(*place) for place in places] == [[0], [1, 3, 5], [2, 4, 6], [7]]


def test_a_head_changes_no_number(models):
    plain, other = (m(IDS, output_hidden_states=True) for m in models)
    np.testing.assert_allclose(other.logits, plain.logits, atol=1e-6)
    for a, b in zip(other.hidden_states, plain.hidden_states, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.exhaustive
def test_a_cache_has_a_head_too(models):
    texts = [m.generate(IDS, max_new_tokens=4) for m in models]
    np.testing.assert_array_equal(*texts)


def test_a_head_is_saved_under_its_own_names(models, tmp_path):
    for name, model in zip(("plain", "folded"), models, strict=True):
        model.save(tmp_path / name)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("plain", "folded"))
    assert one == two
    again = flaxen.load(tmp_path / "plain", scan_layers=True)
    jax.tree.map(np.testing.assert_array_equal, again.module, models[1].module)


def test_adapters_of_a_head_keep_their_layer(models, tmp_path):
    from flaxen.families import find

    names = find("qwen3_moe").names
    tree = jax.tree.map(lambda x: x + 0.1, add_lora(models[1].module, rank=2, targets=["q_proj"]))
    save_adapter(tree, tmp_path, names, alpha=16)
    plain, other = (m.replace(module=load_adapter(m.module, tmp_path, names)) for m in models)
    np.testing.assert_allclose(other(IDS).logits, plain(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_programs_do_not_grow_with_depth(model_type):
    """Equal layers, and five sliding ones to each full one."""
    sizes = {key: value for key, value in MIXED.items() if key in SHARED}

    def program(layers: int) -> tuple[int, int]:
        config = hf_config(sizes | {"model_type": model_type, "num_hidden_layers": layers})
        module = folded(abstract_module(config)[0], stack_params)
        shapes = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, np.float32), module, is_leaf=is_param
        )
        train = jax.grad(lambda module: mean_loss(module, IDS, IDS, runtime=PLAIN))
        lowered = [jax.jit(train).lower(shapes), forward.lower(shapes, IDS, runtime=PLAIN)]
        first, second = (len(each.as_text().splitlines()) for each in lowered)
        return first, second

    assert program(96) == program(12)
