"""Meshes from text, and plans laid on them."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from flaxen.core.errors import PlanError
from flaxen.core.tree import param
from flaxen.shard import MeshSpec, Placement, Plan, make_mesh, parse_mesh, plan_named
from flaxen.shard.mesh import resolve_sizes


def test_text_and_dict_mean_the_same():
    assert parse_mesh(" fsdp=2, tp=4") == parse_mesh({"fsdp": 2, "tp": 4}) == {"fsdp": 2, "tp": 4}


def test_one_size_is_inferred():
    sizes = resolve_sizes({"dp": 1, "fsdp": -1, "tp": 2, "sp": 1}, 8)
    assert sizes == {"dp": 1, "fsdp": 4, "tp": 2, "sp": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dp=3,fsdp=-1", "multiple of 3 devices, and there are 8"),
        ("dp=-1,fsdp=-1", "more than one -1"),
        ("dp=16", "multiple of 16 devices, and there are 8"),
        ("dp=2,dp=2", "given twice"),
        ("dp", "expected name=size"),
        ("dp=two", "expected name=size"),
        ("dp=0", "above 0"),
        ("", "empty"),
        ("__import__('os')=2", "expected name=size"),
    ],
)
def test_a_bad_mesh_says_why(text, reason):
    with pytest.raises(PlanError, match=reason):
        make_mesh(text)


def test_fewer_devices_than_there_are():
    assert make_mesh("tp=2").devices.size == 2


def test_weights_are_cut_by_the_names_of_their_axes():
    placement = Placement(make_mesh("fsdp=2,tp=4"), plan_named("auto"))
    spec = placement.weight_spec(param(heads=8, head_dim=16, embed=64).axes)
    assert spec == P("tp", None, "fsdp")


def test_what_has_embed_alone_is_whole():
    """Norms, of one layer or of stacked ones; what has more axes is cut along it."""
    placement = Placement(make_mesh("fsdp=2,tp=4"), plan_named("auto"))
    for axes in ({"embed": 64}, {"layers": 4, "embed": 64}):
        assert placement.weight_spec(axes) == P()
    assert placement.weight_spec({"experts": 4, "embed": 64}) == P(None, "fsdp")
    assert placement.weight_spec({"mlp": 64}) == P("tp")


@pytest.mark.parametrize("target", [5, None, ("fsdp", "fsdp"), ("tp", 1)])
def test_a_plan_cuts_along_names_of_axes(target):
    with pytest.raises(PlanError, match="Plan weights cuts 'embed' along"):
        Plan({"embed": target}, {})


@pytest.mark.parametrize("given", [{"axis_dims": 5}, {"axis_dims": None}, {"axis_names": 5}])
def test_a_mesh_of_another_kind_is_refused(given):
    with pytest.raises(PlanError, match=rf"{next(iter(given))} is .*; expected"):
        MeshSpec(**given)


def test_a_mesh_axis_is_used_once():
    placement = Placement(make_mesh("tp=4"), Plan({"heads": "tp", "mlp": "tp"}, {}))
    assert placement.weight_spec({"heads": 8, "mlp": 8}) == P("tp", None)


def test_what_does_not_divide_stays_whole_and_is_reported():
    placement = Placement(make_mesh("tp=4"), plan_named("auto"))
    axes = param(kv_heads=2, head_dim=16, embed=64).axes
    assert placement.weight_spec(axes) == P(None, None, None)
    assert placement.uncut(axes) == ["kv_heads=2 does not divide by tp=4"]


def test_batch_one_is_left_whole():
    placement = Placement(make_mesh("fsdp=8"), plan_named("auto"))
    assert placement.activation_spec((1, 5, 64), ("batch", "seq", "embed")) == P(None, None, None)
    spec = placement.activation_spec((16, 5, 64), ("batch", "seq", "embed"))
    assert spec == P("fsdp", None, None)


def test_an_unknown_plan_axis_offers_the_nearest():
    with pytest.raises(PlanError, match="axis 'hedas', which no array has. Did you mean 'heads'"):
        Plan({"hedas": "tp"}, {})


def test_an_unknown_mesh_axis_is_refused():
    with pytest.raises(PlanError, match="'tpp' \\(size 2\\) is used by no rule"):
        Placement(make_mesh("tpp=2"), plan_named("auto"))
    with pytest.raises(PlanError, match="'model', which the mesh lacks"):
        Placement(make_mesh("tp=2"), Plan({"heads": "model"}, {"heads": "tp"}))


def test_users_may_name_their_own_mesh_axes():
    placement = Placement(make_mesh("model=4"), Plan({"heads": "model"}, {"heads": "model"}))
    assert placement.weight_spec({"heads": 8, "embed": 64}) == P("model", None)


def test_what_stays_whole_is_told_once_for_all_weights():
    placement = Placement(make_mesh("tp=4"), plan_named("auto"))
    weights = [param(kv_heads=2, embed=64), param(kv_heads=2, embed=64), param(heads=8)]
    assert placement.all_uncut(weights) == ["kv_heads=2 does not divide by tp=4"]
