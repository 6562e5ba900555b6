"""Pictures of a mesh against what jax says about it."""

from __future__ import annotations

import re

import pytest
from golden import about

from flaxen.cli.show import planned
from flaxen.families.config import abstract_module, hf_config
from flaxen.shard import Placement, make_mesh, plan_named
from flaxen.show import device_names, parts, pictures, placement_page, share_lines
from flaxen.show.devices import pieces, shares, weights

MESHES = ["fsdp=2,tp=4", "dp=2,tp=2,sp=2", "fsdp=8", "tp=2,fsdp=2,dp=2"]


@pytest.fixture(scope="module")
def abstract():
    return abstract_module(hf_config(about("qwen3")["config"]))[0]


@pytest.mark.parametrize("spec", MESHES)
def test_pieces_are_those_that_jax_would_place(abstract, spec):
    placement = Placement(make_mesh(spec), plan_named("auto"))
    found = dict(weights(parts(abstract, placement)))
    for path, param in [
        ("embed_tokens.weight", abstract.embed_tokens.weight),
        ("layers.{0...1}.self_attn.o_proj.weight", abstract.layers[0].self_attn.o_proj.weight),
    ]:
        held = {
            device: piece.box
            for piece in pieces(found[path], dict(placement.mesh.shape))
            for device in piece.devices
        }
        places = placement.weight(param).devices_indices_map(param.shape)
        order = {device: i for i, device in enumerate(placement.mesh.devices.flat)}
        assert held == {
            order[device]: tuple(s.indices(n)[:2] for s, n in zip(index, param.shape, strict=True))
            for device, index in places.items()
        }


def test_devices_are_called_by_their_place_on_the_mesh():
    assert device_names({"fsdp": 2, "tp": 2})[2] == "fsdp 1, tp 0"


def test_shares_add_up_to_what_a_device_holds(abstract):
    root = parts(abstract, planned("fsdp=2,tp=4", None))
    assert sum(size for _, size in shares(root)) == root.device_bytes
    assert "self_attn" in share_lines(root)


def test_weights_that_lie_alike_share_a_picture(abstract):
    root = parts(abstract, planned("fsdp=2,tp=4", None))
    shown = {
        name: text.plain
        for names, text in pictures(root, {"fsdp": 2, "tp": 4})
        for name in names.split("\n")
    }
    assert shown["layers.{0...1}.mlp.down_proj.weight"].split() == [*"01234567"]
    assert shown["layers.{0...1}.mlp.up_proj.weight"].split() == [*"04152637"]


def test_a_mesh_larger_than_this_machine_is_counted(abstract):
    root = parts(abstract, planned("fsdp=32,tp=4", None))
    shown = [text.plain for _, text in pictures(root, {"fsdp": 32, "tp": 4})]
    assert any(text == "128 pieces, each on 1 device" for text in shown)


def test_the_page_shows_every_weight_and_escapes_names(abstract):
    root = parts(abstract, planned("fsdp=2,tp=4", None))
    page = placement_page("<a&b>", root, {"fsdp": 2, "tp": 4}, ["kv_heads=2 < 4"])
    assert "&lt;a&amp;b&gt;" in page and "<a&b>" not in page and "kv_heads=2 &lt; 4" in page
    assert all(path in page for path, _ in weights(root))


def test_pictures_of_more_pieces_have_as_many_colours(abstract):
    root = parts(abstract, planned("fsdp=4,tp=4", None))
    page = placement_page("a", root, {"fsdp": 4, "tp": 4})
    row = page.split("embed_tokens.weight")[1].split("</tr>")[0]
    assert len(set(re.findall(r"hsl\([^)]*\)", row))) == 16
