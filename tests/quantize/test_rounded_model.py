"""Models with rounded weights: while loading, of a live model, on meshes, under adapters."""

from __future__ import annotations

import functools

import golden
import jax
import numpy as np
import pytest

import flaxen
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.core.tree import paths
from flaxen.fresh import from_config
from flaxen.layers.runtime import Runtime, WeightSettings
from flaxen.quantize import RoundedWeight, Rounding
from flaxen.train.state import State
from flaxen.tune import add_lora, merge

BOUNDS = {8: 0.02, 4: 0.4}
"""Of what logits differ by at most, over the largest logit; the golden weights are random."""


def leaves(model):
    found = paths(model.module, lambda x: isinstance(x, RoundedWeight))
    return {path: x for path, x in found.items() if isinstance(x, RoundedWeight)}


def same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        for role, part in leaf.parts.items():
            np.testing.assert_array_equal(part, other[path].parts[role], err_msg=path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def write(name):
        return golden.write_folder(golden.case(name), tmp_path_factory.mktemp(name))

    return write


def logits(model, name):
    return np.asarray(model(golden.case(name).arrays["full_input_ids"]).logits)


@pytest.mark.parametrize(
    ("name", "bits", "scan"),
    [("llama", 8, True), ("llama", 4, False), ("mixtral", 8, False), ("gpt2", 4, True)],
)
def test_logits_stay_near(folder, name, bits, scan):
    model = flaxen.load(folder(name), bits=bits, scan_layers=scan)
    expected = golden.case(name).arrays["full_logits"]
    assert leaves(model)
    off = np.abs(logits(model, name) - expected).max() / np.abs(expected).max()
    assert 1e-4 < off < BOUNDS[bits]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rounding_while_loading_is_rounding_of_the_loaded(folder, name):
    loaded = flaxen.load(folder(name), dtype="bfloat16", bits=4)
    live = flaxen.load(folder(name), dtype="bfloat16").quantize(4)
    same(loaded, live)
    np.testing.assert_array_equal(logits(loaded, name), logits(live, name))


@pytest.mark.parametrize("mesh", ["fsdp=8", "tp=4,fsdp=2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_same_on_every_mesh(folder, mesh, bits):
    alone = flaxen.load(folder("llama"), bits=bits, scan_layers=False)
    cut = flaxen.load(folder("llama"), bits=bits, mesh=mesh, scan_layers=False)
    same(alone, cut)
    held = [leaf.parts["codes"] for leaf in leaves(cut).values()]
    assert sum(x.addressable_shards[0].data.nbytes for x in held) < sum(x.nbytes for x in held) / 2
    ids = np.resize(golden.case("llama").arrays["full_input_ids"], (8, 6))
    found, expected = (np.asarray(m(ids).logits) for m in (cut, alone))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rounded_experts_live_on_a_mesh(folder):
    alone = flaxen.load(folder("mixtral"), bits=8, scan_layers=False)
    cut = flaxen.load(folder("mixtral"), bits=8, mesh="ep=2,tp=2", scan_layers=False)
    same(alone, cut)
    np.testing.assert_allclose(logits(cut, "mixtral"), logits(alone, "mixtral"), atol=1e-4)


def test_bytes_really_fall(folder):
    model = flaxen.load(folder("llama"), scan_layers=False)
    for bits, share in ((8, 4), (4, 8)):
        for path, leaf in leaves(model.quantize(Rounding(bits, -1))).items():
            weight = model.parameters()[path]
            assert leaf.parts["codes"].nbytes == weight.nbytes / share
            assert leaf.nbytes < weight.nbytes / share + 2 * weight.shape[0] * 64


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_model_has_as_many_parameters_and_its_runtime_says_the_bits(folder, bits):
    plain = flaxen.load(folder("llama"))
    for model in (flaxen.load(folder("llama"), bits=bits), plain.quantize(bits)):
        assert model.num_parameters == plain.num_parameters
        assert model.runtime.weights.bits == bits
    by_path = flaxen.load(folder("llama"), runtime=model.runtime, bits={"mlp": 8})
    assert by_path.runtime.weights.bits is None


def test_fresh_weights_are_rounded_as_the_runtime_says():
    runtime = Runtime(weights=WeightSettings(bits=8))
    model = from_config(golden.case("llama").config, runtime=runtime)
    same(model, from_config(golden.case("llama").config).quantize(8))
    abstract = from_config(golden.case("llama").config, runtime=runtime, abstract=True)
    same(model, abstract.init_weights(0))


def test_what_was_saved_in_few_bits_is_not_rounded_again(folder, tmp_path):
    model = flaxen.load(folder("llama"), bits=4)
    model.save(tmp_path / "a", quantize="gptq", runtime=True)
    again = flaxen.load(tmp_path / "a", runtime=tmp_path / "a")
    np.testing.assert_allclose(logits(again, "llama"), logits(model, "llama"), atol=1e-4)


def test_a_state_of_training_holds_no_rounded_weights(folder):
    model = flaxen.load(folder("llama"), bits=8)
    with pytest.raises(ConfigError, match="q_proj.weight is no plain weight"):
        State.create(params=model.module)


def test_heads_tables_routers_and_norms_stay(folder):
    model = flaxen.load(folder("qwen2_moe"), bits=8)
    kept = [path for path in paths(model.module) if not path.endswith((".codes", ".scales"))]
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in kept if "bias" not in path} >= {
        "embed_tokens",
        "lm_head",
        "norm",
        "gate",
    }
    assert any("experts.down_proj" in path for path in leaves(model))


@pytest.mark.parametrize("scan", [False, True])
def test_the_first_rule_that_is_found_counts(folder, scan):
    rules = {r"mlp\.up_proj": None, "mlp": 4, "q_proj|embed_tokens": Rounding(8, 32)}
    model = flaxen.load(folder("llama"), bits=rules, scan_layers=scan)
    found = {p.rpartition(".weight")[0].rpartition(".")[2]: x for p, x in leaves(model).items()}
    assert {k: (x.rounding.bits, x.rounding.group) for k, x in found.items()} == {
        "embed_tokens": (8, 32),
        "q_proj": (8, 32),
        "gate_proj": (4, found["gate_proj"].rounding.group),
        "down_proj": (4, found["down_proj"].rounding.group),
    }
    assert np.isfinite(logits(model, "llama")).all()


def test_rules_name_layers_of_a_folded_model_too(folder):
    load = functools.partial(flaxen.load, folder("llama"), scan_layers=True)
    assert leaves(load(bits={r"layers\.\d+\.mlp": 8}))
    with pytest.raises(ConfigError, match="treat layers.0.*unlike; load with scan_layers=False"):
        load(bits={r"layers\.0\.mlp": 8})


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"mpl": 4}, "'mpl' is found in the path of no matrix"),
        ({"(": 4}, "is no regular expression"),
        (3, "bits is 3; expected 8 or 4"),
        ({"mlp": Rounding(4, 7)}, "mlp.*cannot be rounded: .*groups of 7"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(folder, rules, said):
    with pytest.raises(ConfigError, match=said):
        flaxen.load(folder("llama"), bits=rules)


@pytest.mark.parametrize("scan", [False, True])
def test_adapters_learn_on_rounded_weights(folder, scan):
    model = flaxen.load(folder("llama"), bits=4, scan_layers=scan)
    tuned = model.replace(module=add_lora(model.module, rank=2))
    np.testing.assert_allclose(logits(tuned, "llama"), logits(model, "llama"), atol=1e-5)
    ids = golden.case("llama").arrays["full_input_ids"]
    loss = lambda m: m(ids, labels=ids).loss
    grads = jax.jit(jax.grad(loss, allow_int=True))(tuned)
    b = [np.abs(x).max() for path, x in paths(grads.module).items() if path.endswith("weight.b")]
    assert b
    assert min(b) > 0
    merged = model.replace(module=merge(tuned.module))
    assert "q_proj" not in "".join(leaves(merged))
    np.testing.assert_allclose(logits(merged, "llama"), logits(model, "llama"), atol=1e-4)


def test_a_model_with_adapters_is_not_rounded(folder):
    model = flaxen.load(folder("llama"))
    tuned = model.replace(module=add_lora(model.module, rank=2))
    with pytest.raises(ConfigError, match="no plain weight. Merge adapters, or quantise first"):
        tuned.quantize(8)


def test_rounded_weights_are_not_saved_as_if_they_were_the_original(folder, tmp_path):
    model = flaxen.load(folder("llama"), bits=8)
    for options in ({}, {"quantize": "fp8"}):
        with pytest.raises(CheckpointError, match="holds rounded weights, not those"):
            model.save(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
    model.save(tmp_path / "a", dtype="float32")
    again = flaxen.load(tmp_path / "a")
    for path, leaf in leaves(model).items():
        np.testing.assert_array_equal(again.parameters()[path], leaf.values())


def test_a_rounded_model_is_not_rounded_again(folder):
    small = flaxen.load(folder("llama"), bits=8)
    with pytest.raises(ConfigError, match="packed already"):
        small.quantize(4)


def test_matrices_of_four_bits_share_a_group_whatever_rule_names_them(folder):
    model = flaxen.load(folder("llama"), bits={"mlp": 4, "self_attn": 4})
    groups = {x.scheme.group for x in leaves(model).values()}
    assert groups == {x.scheme.group for x in leaves(flaxen.load(folder("llama"), bits=4)).values()}
    assert len(groups) == 1
