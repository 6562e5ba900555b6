"""The parts of a model and their sizes."""

from __future__ import annotations

import io
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from flaxen.core.tree import ones_param, param
from flaxen.shard import PLANS, Placement, make_mesh
from flaxen.show import human_bytes, human_number, parts, parts_tree, totals


def layer(width: int = 8):
    return {
        "up_proj": {"weight": param(mlp=16, embed=width)},
        "norm": {"weight": ones_param(embed=width)},
    }


MODEL = {
    "embed_tokens": {"weight": param(vocab=32, embed=8)},
    "layers": [layer(), layer(), layer()],
}
PLACED = Placement(AbstractMesh((2, 4), ("fsdp", "tp")), PLANS["auto"])


def child(part, *names: str):
    for name in names:
        part = next(c for c in part.children if c.name == name)
    return part


def test_parameters_and_bytes_are_summed():
    assert totals(parts(MODEL)) == {
        "parameters": 32 * 8 + 3 * (16 * 8 + 8),
        "bytes": 4 * (32 * 8 + 3 * (16 * 8 + 8)),
        "bytes_per_device": 4 * (32 * 8 + 3 * (16 * 8 + 8)),
    }


def test_equal_layers_are_one_part():
    folded = child(parts(MODEL), "layers", "{0...2}")
    assert folded.copies == 3
    assert folded.parameters == 3 * (16 * 8 + 8)


def test_layers_that_differ_stay_apart():
    mixed = {"layers": [layer(), layer(), layer(4)]}
    assert [part.name for part in child(parts(mixed), "layers").children] == ["{0...1}", "2"]


def test_bytes_on_each_device_follow_the_plan_without_any_device():
    weight = child(parts(MODEL, PLACED), "embed_tokens", "weight")
    assert weight.cut == ("tp", "fsdp")
    assert weight.device_bytes == weight.nbytes // 8
    norm = child(parts(MODEL, PLACED), "layers", "{0...2}", "norm", "weight")
    assert norm.device_bytes == norm.nbytes


def test_real_arrays_are_counted_as_they_lie():
    mesh = make_mesh("tp=8")
    x = jax.device_put(np.zeros((16, 4), np.float16), NamedSharding(mesh, PartitionSpec("tp")))
    part = child(parts({"weight": x}), "weight")
    assert (part.nbytes, part.device_bytes, part.dtype) == (128, 16, "float16")


def test_the_tree_prints_folded_layers_and_cuts():
    console = Console(file=io.StringIO(), width=140)
    console.print(parts_tree(parts(MODEL, PLACED)))
    text = console.file.getvalue()
    assert "{0...2}" in text and "mlp=16/tp embed=8/fsdp" in text


def test_parts_can_be_written_as_json():
    written = json.loads(json.dumps(parts(MODEL, PLACED).as_dict()))
    assert written["children"][0]["name"] == "embed_tokens"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_bytes_for_people(size: int, text: str):
    assert human_bytes(size) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (134_515_008, "134.5M"), (7e9, "7.0B")])
def test_numbers_for_people(count: float, text: str):
    assert human_number(count) == text
