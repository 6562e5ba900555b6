"""One tensor for each expert in the file, one for all of them on the devices."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from flaxen.convert.lazy import Box, LazyTensor, box_shape
from flaxen.convert.load import match
from flaxen.convert.place import boxes, place
from flaxen.convert.relation import relate
from flaxen.core.tree import is_param, paths, rebuild
from flaxen.families.config import abstract_module, hf_config
from flaxen.shard import placement_on

SIZES = {
    "vocab_size": 16,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}


class Recorded(LazyTensor):
    """An array that counts how often each of its elements is read."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads = np.zeros(array.shape, int)

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.reads[box] += 1
        out[:] = self.array[box]


def build(kind: str = "mixtral", **more):
    raw = {"model_type": kind, **SIZES, "num_local_experts": 16, **more}
    return abstract_module(hf_config(raw))[:2]


def expert_of(name: str) -> int:
    return int(re.search(r"experts\.(\d+)\.", name)[1])


def checkpoint(relation, fill) -> dict[str, Recorded]:
    return {
        name: Recorded(np.full(shape, fill(name), np.float32))
        for name, shape in relation.shapes().items()
    }


def numbered(name: str) -> float:
    return expert_of(name) if ".experts." in name else -1


@pytest.mark.parametrize(("mesh", "ways"), [("ep=8", (8, 1)), ("ep=4,tp=2", (4, 2))])
def test_a_device_reads_its_own_experts_only(mesh, ways):
    module, family = build()
    relation, placement = relate(module, family.names), placement_on(mesh)
    tensors = checkpoint(relation, numbered)
    weights = match(relation, tensors).weights
    path = "layers.1.mlp.experts.down_proj.weight"
    names = next(row.names for row in relation.table() if row.path == path)
    param, per_device = paths(module, is_param)[path], 16 // ways[0]
    seen = []
    for box, _ in boxes(placement.weight(param), param.shape):
        weights[path].read(box)
        asked = {name for name in tensors if tensors[name].reads.any()}
        first = box[0].start
        assert asked == {names[i] for i in range(first, first + per_device)}
        # Of those, the device's own half of the inner width, each element once.
        read = np.stack([tensors[name].reads for name in sorted(asked)])
        assert read.max() == 1
        assert read.sum() == np.prod(box_shape(box)) == param.size / 8
        seen.append(first)
        for name in asked:
            tensors[name].reads[:] = 0
    assert sorted(seen) == sorted([*range(0, 16, per_device)] * ways[1])


@pytest.mark.parametrize("mesh", ["ep=8", "ep=4,tp=2"])
def test_every_byte_of_the_file_is_read_once(mesh):
    module, family = build(num_key_value_heads=4)
    relation, placement = relate(module, family.names), placement_on(mesh)
    tensors = checkpoint(relation, numbered)
    where = {path: placement.weight(p) for path, p in paths(module, is_param).items()}
    weights = match(relation, tensors).weights
    placed = place({path: weights[path] for path in where}, where)
    for name, tensor in tensors.items():
        assert (tensor.reads == 1).all(), name
    stacked = placed["layers.0.mlp.experts.gate_proj.weight"]
    for shard in stacked.addressable_shards:
        first = shard.index[0].start or 0
        np.testing.assert_array_equal(
            np.asarray(shard.data)[:, 0, 0], np.arange(first, first + len(shard.data))
        )


def test_expert_10_follows_9_and_not_1():
    """Square and filled with their numbers: neither order nor orientation shows in a shape."""
    module, family = build(num_local_experts=12)
    relation = relate(module, family.names)
    tensors = checkpoint(relation, numbered)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.array[:] += np.arange(24)[:, None] / 100
    weights = match(relation, tensors).weights
    for part in ("gate_proj", "up_proj", "down_proj"):
        stacked = weights[f"layers.0.mlp.experts.{part}.weight"].read()
        for i in range(12):
            want = np.broadcast_to(np.float32(i + np.arange(24)[:, None] / 100), (24, 24))
            np.testing.assert_allclose(stacked[i], want, rtol=1e-6)
    back = relation.save(weights)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].read().tobytes() == tensor.array.tobytes(), name


def test_a_lost_expert_is_named():
    module, family = build(num_local_experts=12)
    relation = relate(module, family.names)
    tensors = checkpoint(relation, numbered)
    lost = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    del tensors[lost]
    found = match(relation, tensors)
    assert found.report.missing == [lost]
    assert "layers.1.mlp.experts.down_proj.weight" not in found.weights
    with pytest.raises(ValueError, match=re.escape(lost)):
        found.report.raise_if_bad()


def test_files_that_pack_all_experts_are_the_same_model():
    """Loaded from the packed layout, and as lazily: a device reads its own experts only."""
    module, family = build("qwen3_moe")
    relation = relate(module, family.names)
    rng = np.random.default_rng(0)
    single = {n: rng.normal(size=s).astype("f") for n, s in relation.shapes().items()}
    packed = {n: Recorded(a) for n, a in single.items() if ".experts." not in n}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([single[f"{at}.{i}.{part}_proj.weight"] for i in range(16)])
            for part in ("gate", "up", "down")
        )
        packed[f"{at}.gate_up_proj"] = Recorded(np.concatenate([gate, up], axis=1))
        packed[f"{at}.down_proj"] = Recorded(down)
    found = match(relation, packed, family.transforms)
    assert not found.report.missing + found.report.unexpected
    wanted = match(relation, {n: Recorded(a) for n, a in single.items()}).weights
    for path, tensor in wanted.items():
        np.testing.assert_array_equal(found.weights[path].read(), tensor.read(), err_msg=path)
    source = packed["model.layers.0.mlp.experts.gate_up_proj"]
    source.reads[:] = 0
    up = found.weights["layers.0.mlp.experts.up_proj.weight"]
    up.read((slice(4, 6), slice(0, 24), slice(0, 24)))
    assert source.reads[4:6, 24:].all()
    assert source.reads.sum() == 2 * 24 * 24


def test_folded_layers_of_experts_have_both_axes():
    """A stack of stacks: layers, then experts."""
    from flaxen.convert.lazy import stack
    from flaxen.models.fold import folded

    module, family = build()
    relation = relate(module, family.names)
    weights = match(relation, checkpoint(relation, numbered)).weights
    tree = folded(rebuild(module, weights), stack)
    tensor = tree.layers.body[0].mlp.experts.up_proj.weight
    assert tensor.shape == (2, 16, 24, 24)
    np.testing.assert_array_equal(tensor.read()[1, :, 0, 0], np.arange(16))
    assert jax.tree.structure(tree.layers.body[0]).num_leaves == 10
