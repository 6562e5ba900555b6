"""Several adapters on one model: sums, choices, merging some, one for each row of a batch."""

from __future__ import annotations

import dataclasses

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny

import flaxen
from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import paths
from flaxen.layers.runtime import PLAIN
from flaxen.models.causal import forward
from flaxen.tune import (
    adapter_names,
    adapters,
    add_lora,
    for_rows,
    merge,
    set_adapters,
    trainable_paths,
    without_adapters,
)
from flaxen.tune.leaf import LowRank, chained, is_adapter, links, root

IDS = golden.case("llama").arrays["full_input_ids"][:2]


def moved(tree, name: str, seed: int):
    """The model with random numbers in every `b` of one adapter."""
    draw = np.random.default_rng(seed)

    def one(link):
        if link.name != name or not isinstance(link, LowRank):
            return link
        return dataclasses.replace(link, b=jnp.float32(draw.normal(size=link.b.shape) * 0.1))

    change = lambda leaf: chained(root(leaf), map(one, links(leaf)))
    return jax.tree.map(lambda x: change(x) if is_adapter(x) else x, tree, is_leaf=is_adapter)


def two(tree, **options):
    """The model with an adapter "fr" of rank 2 and one "de" of rank 3."""
    tree = add_lora(tree, rank=2, alpha=4, name="fr", targets=("q_proj", "up_proj"))
    tree = add_lora(tree, rank=3, alpha=4, name="de", targets=("q_proj", "o_proj"), **options)
    return moved(moved(tree, "fr", 1), "de", 2)


def logits(tree, ids=IDS):
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(tree, ids, runtime=PLAIN).logits)


@pytest.fixture(scope="module")
def both():
    return two(tiny().module)


def weight(tree) -> np.ndarray:
    return np.asarray(tree.layers.body[0].self_attn.q_proj.weight, np.float64)


def delta(link) -> np.ndarray:
    a, b = np.asarray(link.a, np.float64), np.asarray(link.b, np.float64)
    return link.scale * np.einsum("lnhr,lrd->lnhd", b, a)


def test_both_are_summed_with_their_weights(both):
    """The weight after merging is W + 0.7 s B A + 0.3 s' B' A', in float64."""
    fr, de = links(both.layers.body[0].self_attn.q_proj.weight)
    exact = weight(tiny().module) + 0.7 * delta(fr) + 0.3 * delta(de)
    weighted = set_adapters(both, ["fr", "de"], [0.7, 0.3])
    np.testing.assert_allclose(weight(merge(weighted)), exact, atol=1e-6)
    np.testing.assert_allclose(logits(merge(weighted)), logits(weighted), atol=1e-5)


def test_one_that_is_not_active_changes_nothing(both):
    alone = logits(without_adapters(both, "de"))
    np.testing.assert_array_equal(logits(set_adapters(both, "fr")), alone)
    np.testing.assert_array_equal(logits(set_adapters(both, [])), logits(tiny().module))


def test_other_weights_compile_nothing_anew(both):
    run = jax.jit(lambda tree: tree.layers.body[0].self_attn.q_proj.weight.a.sum())
    run(set_adapters(both, ["fr", "de"], [0.7, 0.3]))
    run(set_adapters(both, ["fr", "de"], [0.1, 0.9]))
    assert run._cache_size() == 1


def test_one_is_merged_and_the_other_stays(both):
    half = merge(both, "fr")
    assert adapter_names(half) == ["de"]
    np.testing.assert_allclose(logits(half), logits(both), atol=1e-5)
    np.testing.assert_allclose(logits(merge(half, "de")), logits(both), atol=1e-5)


def test_what_is_merged_cannot_be_merged_again(both):
    with pytest.raises(ConfigError, match=r"no adapter 'fr'; it has 'de'. Was it merged"):
        merge(merge(both, "fr"), "fr")


def test_merging_leaves_the_base_as_it_was():
    base = tiny().module
    before = {path: np.array(x) for path, x in paths(base).items()}
    back = without_adapters(two(base))
    merge(two(base))
    for path, x in paths(back).items():
        assert x is paths(base)[path]
        np.testing.assert_array_equal(x, before[path])


def test_dora_is_not_merged_apart_from_others():
    mixed = two(tiny().module, use_dora=True)
    with pytest.raises(ConfigError, match="one of them DoRA's"):
        merge(mixed, "fr")
    np.testing.assert_allclose(logits(merge(mixed)), logits(mixed), atol=2e-5)


def test_a_name_is_taken_once(both):
    with pytest.raises(ConfigError, match="has an adapter 'fr' already"):
        add_lora(both, name="fr")


def test_an_unknown_name_offers_the_nearest(both):
    with pytest.raises(ConfigError, match=r"no adapter 'frr'.*Did you mean 'fr'"):
        set_adapters(both, ["frr"])
    with pytest.raises(ConfigError, match="1 weights were given for 2 adapters"):
        set_adapters(both, ["fr", "de"], [1.0])


def test_only_active_adapters_are_trained(both):
    every, one = trainable_paths(both), trainable_paths(set_adapters(both, "fr"))
    leaves = paths(both)
    assert every <= leaves.keys()
    assert {path.rpartition(".")[2] for path in every} == {"a", "b"}
    assert {leaves[path].shape[1] for path in one if path.endswith(".a")} == {2}
    assert trainable_paths(both, "fr") == one


def test_each_row_has_its_own_adapter(both):
    """Row for row what the model computes with that adapter alone."""
    mixed = logits(for_rows(both, ["de", None, "fr", "de"]), np.concatenate([IDS, IDS]))
    alone = {name: logits(set_adapters(both, name)) for name in ("fr", "de")}
    plain = logits(tiny().module)
    for row, want in enumerate([alone["de"][0], plain[1], alone["fr"][0], alone["de"][1]]):
        np.testing.assert_allclose(mixed[row], want, atol=1e-5)


def test_rows_that_were_not_chosen_for_are_refused(both):
    with pytest.raises(InputError, match="chosen for 3 rows, and a projection sees 2"):
        logits(for_rows(both, ["de", "fr", "fr"]))
    with pytest.raises(ConfigError, match="no low-rank sum"):
        for_rows(two(tiny().module, use_dora=True), ["fr"])


def test_several_folders_are_loaded_by_name(tmp_path):
    base = golden.write_folder(golden.case("llama"), tmp_path / "base")
    lora = golden.write_adapter("llama_lora", tmp_path / "lora")
    dora = golden.write_adapter("llama_dora", tmp_path / "dora")
    model = flaxen.load(base, adapter={"plain": lora, "lengths": dora})
    assert model.adapters() == ["plain", "lengths"]
    ids = golden.case("llama").arrays["full_input_ids"]
    for name, case in (("plain", "llama_lora"), ("lengths", "llama_dora")):
        with np.load(golden.DATA / "adapters" / f"{case}.npz") as file:
            np.testing.assert_allclose(
                model.set_adapters(name)(ids).logits, file["logits"], atol=5e-5
            )
    with pytest.raises(ConfigError, match="say which one by name="):
        model.save_adapter(tmp_path / "again")
    model.save_adapter(tmp_path / "again", "lengths")
    again = flaxen.load(base, adapter=tmp_path / "again")
    assert len(adapters(again.module)) == 14


def test_rows_go_on_with_their_own_adapters(tmp_path):
    """Greedy tokens of each row do not depend on the adapter of the other."""
    base = golden.write_folder(golden.case("llama"), tmp_path / "base")
    one = golden.write_adapter("llama_lora", tmp_path / "one")
    model = flaxen.load(base, adapter={"one": one})
    told = lambda names: model.for_rows(names).generate(IDS, max_new_tokens=4)
    rows, alone = told(["one", None]), [told(["one", "one"]), told([None, None])]
    for i, want in enumerate(alone):
        np.testing.assert_array_equal(_tokens(rows)[i], _tokens(want)[i])
    assert not np.array_equal(_tokens(alone[0])[0], _tokens(alone[1])[0])
    with pytest.raises(ConfigError, match="no adapters to merge"):
        model.for_rows(["one", None]).merge_adapters()


def _tokens(out):
    return np.asarray(getattr(out, "sequences", out))
