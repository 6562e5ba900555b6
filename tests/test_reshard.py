"""A live model on another mesh: the same numbers, other places."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from golden import case, write_folder
from jax.sharding import PartitionSpec as P

import flaxen
from flaxen.core.errors import PlanError
from flaxen.tune import add_lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(case("llama"), tmp_path_factory.mktemp("llama"))


def logits(model):
    return np.asarray(model(case("llama").arrays["full_input_ids"]).logits)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("before", [None, "fsdp=8"])
@pytest.mark.parametrize("after", [None, "tp=2,fsdp=4", "dp=2"])
def test_weights_are_equal_and_where_loading_would_put_them(folder, scan, before, after):
    moved = flaxen.load(folder, mesh=before, scan_layers=scan).reshard(after)
    loaded = flaxen.load(folder, mesh=after, scan_layers=scan)
    assert moved.mesh == loaded.mesh
    for ours, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(loaded), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)


def test_the_moved_model_computes_the_same(folder):
    model = flaxen.load(folder)
    want = logits(model)
    np.testing.assert_allclose(logits(model.reshard("tp=2,fsdp=4")), want, atol=1e-5)
    np.testing.assert_allclose(logits(model.reshard("fsdp=8", "fsdp").reshard(None)), want)


def test_adapters_move_with_their_weights(folder):
    model = flaxen.load(folder)
    adapted = model.replace(module=add_lora(model.module, rank=2)).reshard("tp=2,fsdp=4")
    leaf = adapted.module.layers[0].mlp.gate_proj.weight
    assert leaf.a.sharding.spec == P(None, "fsdp")
    assert leaf.b.sharding.spec == P("tp", None)


def test_a_mesh_for_which_there_are_no_devices_is_refused(folder):
    with pytest.raises(PlanError, match="needs a multiple of 16"):
        flaxen.load(folder).reshard("tp=16")
