"""Each conversion operation against recorded results of Transformers 5.24 on torch."""

from __future__ import annotations

import functools
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from counting import Source
from golden import DATA
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxen.convert import ops
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.lazy import aligned_empty
from flaxen.convert.place import place
from flaxen.core.errors import FlaxenError

CASES = {case["name"]: case for case in json.loads((DATA / "unit/ops.json").read_text())}


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "unit/ops.npz"))


def make(name: str, args: dict[str, Any]) -> ops.ConversionOps:
    return getattr(ops, name)(**args)


def configuration(case: dict[str, Any]) -> SimpleNamespace:
    config = dict(case["config"] or {})
    if "vision_config" in config:
        heads = re.fullmatch(r"_Cfg\(num_attention_heads=(\d+)\)", config["vision_config"])
        assert heads is not None
        config["vision_config"] = SimpleNamespace(num_attention_heads=int(heads[1]))
    return SimpleNamespace(**config)


def inputs(case: dict[str, Any]) -> ops.Tensors:
    found: ops.Tensors = {}
    for key, about in case["inputs"].items():
        each = [ArrayTensor(arrays()[f"{case['name']}/in/{key}/{i}"]) for i in range(about["n"])]
        found[key] = each if about["is_list"] else each[0]
    return found


def convert(case: dict[str, Any]) -> ops.Tensors:
    # Operations that cut to measure were recorded on a model with tensors of these shapes.
    shapes = {key: tuple(about["shapes"][0]) for key, about in case["outputs"].items()}
    return make(case["op"], case["args"]).convert(
        inputs(case),
        case["src"],
        case["tgt"],
        full_layer_name=case["tgt"][0],
        config=configuration(case),
        shapes=shapes,
    )


def named(kind: bool):
    return [name for name, case in CASES.items() if (case["error"] is None) == kind]


def test_every_recorded_case_is_here():
    assert len(CASES) == 29 and len(named(False)) == 3


@pytest.mark.parametrize("name", named(True))
def test_an_operation_gives_the_recorded_tensors(name: str):
    case = CASES[name]
    found = convert(case)
    assert list(found) == list(case["outputs"])
    for key, about in case["outputs"].items():
        value = found[key]
        assert isinstance(value, list) == about["is_list"]
        for i, tensor in enumerate(value if isinstance(value, list) else [value]):
            np.testing.assert_array_equal(tensor.read(), arrays()[f"{name}/out/{key}/{i}"])


@pytest.mark.parametrize("name", named(False))
def test_an_operation_refuses_what_it_cannot_take(name: str):
    kind, _, text = CASES[name]["error"].partition(": ")
    assert kind == "ValueError"
    with pytest.raises(FlaxenError, match=re.escape(text)):
        convert(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_inverse_has_the_recorded_settings(name: str):
    case = CASES[name]
    inverse = make(case["op"], case["args"]).reverse_op
    assert type(inverse).__name__ == case["reverse"]["op"]
    assert vars(inverse) == case["reverse"]["args"]


def lazy(array: np.ndarray) -> Source:
    return Source(np.array(array))


def rows(count: int, width: int, first: int = 0) -> np.ndarray:
    """Row r is filled with r."""
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], width, axis=1)


GROUPED = {"a.q.weight": (48, 32), "a.k.weight": (12, 32), "a.v.weight": (12, 32)}
"""Four query heads and one key-value head of 12."""


@pytest.mark.parametrize("operation", [ops.Split(), ops.Chunk()], ids=["split", "chunk"])
def test_a_fused_projection_of_grouped_heads_is_cut_where_its_heads_end(operation):
    fused = lazy(rows(72, 32))
    targets = ["a.q", "a.k", "a.v"]
    parts = operation.convert(
        {"a.qkv": [fused]}, ["a.qkv"], targets, full_layer_name="a.q.weight", shapes=GROUPED
    )
    for name, first, stop in [("a.q", 0, 48), ("a.k", 48, 60), ("a.v", 60, 72)]:
        np.testing.assert_array_equal(parts[name].read(), rows(stop - first, 32, first))
    back = operation.reverse_op.convert(parts, targets, ["a.qkv"])
    np.testing.assert_array_equal(back["a.qkv"].read(), fused.array)


def test_two_devices_read_each_half_of_the_heads_of_a_fused_projection():
    fused = lazy(rows(72, 32))
    targets = ["a.q", "a.k", "a.v"]
    parts = ops.Split().convert(
        {"a.qkv": [fused]}, ["a.qkv"], targets, full_layer_name="a.q.weight", shapes=GROUPED
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ["tp"])
    arrays = place(parts, dict.fromkeys(targets, NamedSharding(mesh, PartitionSpec("tp"))))
    first_rows = {
        name: [int(shard.data[0, 0]) for shard in array.addressable_shards]
        for name, array in arrays.items()
    }
    assert first_rows == {"a.q": [0, 24], "a.k": [48, 54], "a.v": [60, 66]}
    assert fused.counter.total == fused.nbytes


def test_grouped_projections_joined_into_one_come_apart_at_their_own_sizes():
    parts = {"q": lazy(rows(48, 32)), "k": lazy(rows(12, 32, 48)), "v": lazy(rows(12, 32, 60))}
    join = ops.Concatenate()
    fused = join.convert(parts, ["q", "k", "v"], ["qkv"])
    shapes = {key: tensor.shape for key, tensor in parts.items()}
    back = join.reverse_op.convert(
        fused, ["qkv"], ["q", "k", "v"], full_layer_name="q", shapes=shapes
    )
    for key, tensor in parts.items():
        np.testing.assert_array_equal(back[key].read(), tensor.array)


def experts(count: int, side: int = 4) -> list[Source]:
    """Expert i is a square filled with i."""
    return [lazy(np.full((side, side), i, np.float32)) for i in range(count)]


def test_the_tenth_of_twelve_experts_does_not_follow_the_first():
    merge = ops.MergeModulelist()
    stacked = merge.convert({"e.*.w": experts(12)}, ["e.*.w"], ["e.w"])["e.w"]
    assert stacked.shape == (12, 4, 4)
    for i in range(12):
        np.testing.assert_array_equal(stacked.read()[i], np.full((4, 4), i))
    back = merge.reverse_op.convert({"e.w": stacked}, ["e.w"], ["e.*.w"])
    assert list(back) == [f"e.{i}.w" for i in range(12)]
    for i in range(12):
        np.testing.assert_array_equal(back[f"e.{i}.w"].read(), np.full((4, 4), i))


def test_gate_rows_come_before_up_rows_in_every_expert():
    sources, target = ["e.*.gate", "e.*.up"], ["e.gate_up"]
    gates, ups = experts(12), [lazy(expert.array + 100) for expert in experts(12)]
    tensors = ops.MergeModulelist().convert({"e.*.up": ups, "e.*.gate": gates}, sources, target)
    fused = ops.Concatenate(1).convert(tensors, sources, target)["e.gate_up"].read()
    for i in range(12):
        np.testing.assert_array_equal(fused[i, :4], np.full((4, 4), i))
        np.testing.assert_array_equal(fused[i, 4:], np.full((4, 4), 100 + i))


def test_a_device_reads_only_the_experts_it_holds():
    each = experts(8)
    stacked = ops.MergeModulelist().convert({"e.*.w": each}, ["e.*.w"], ["e.w"])["e.w"]
    stacked.read((slice(2, 4), slice(0, 4), slice(0, 4)))
    assert [expert.counter.total > 0 for expert in each] == [i in (2, 3) for i in range(8)]


@pytest.mark.parametrize("operation", [ops.Chunk(), ops.SplitModulelist(), ops.Transpose(1, 2)])
def test_pieces_of_mapped_memory_are_views_of_it(operation: ops.ConversionOps):
    array = aligned_empty((2, 1, 16), np.dtype(np.float32))
    targets = ["x", "y"] if isinstance(operation, ops.Chunk) else ["x.*"]
    found = operation.convert({"a": Source(array, shows_memory=True)}, ["a"], targets)
    for tensor in found.values():
        values = tensor.reshape((tensor.size,)).view()
        assert values is not None and np.shares_memory(values, array)


def test_text_and_vision_experts_come_back_when_their_number_is_odd():
    fuse = ops.ErnieFuseAndSplitTextVisionExperts()
    sources, targets = ["e.*.gate", "e.*.up"], ["text", "vision"]
    given = {"e.*.gate": experts(5), "e.*.up": [lazy(e.array + 100) for e in experts(5)]}
    fused = fuse.convert(given, sources, targets)
    assert [fused[key].shape for key in targets] == [(3, 8, 4), (2, 8, 4)]
    back = fuse.reverse_op.convert(fused, targets, sources)
    for pattern, tensors in given.items():
        for i, tensor in enumerate(tensors):
            np.testing.assert_array_equal(back[pattern.replace("*", str(i))].read(), tensor.array)


def test_a_vocabulary_loses_its_padding_and_gets_it_again():
    config = SimpleNamespace(unpadded_vocab_size=5, vocab_size=8)
    padded = np.concatenate([rows(5, 3, 1), np.zeros((3, 3), np.float32)])
    crop = ops.UnpadVocab()
    cut = crop.convert({"head": lazy(padded)}, ["head"], ["head"], config=config)["head"]
    np.testing.assert_array_equal(cut.read(), padded[:5])
    back = crop.reverse_op.convert({"head": cut}, ["head"], ["head"], config=config)["head"]
    np.testing.assert_array_equal(back.read(), padded)
    for start, stop in itertools.combinations(range(9), 2):
        box = (slice(start, stop), slice(1, 3))
        np.testing.assert_array_equal(back.read(box), padded[box])


def test_the_queries_of_each_layer_lie_around_its_key_value_queries():
    merge = ops.MergeMessageQueries()
    queries, others = lazy(rows(4, 3)), lazy(rows(4, 3, 100))
    merged = merge.convert({"q": [queries], "kv": [others]}, ["q", "kv"], ["all"])
    np.testing.assert_array_equal(
        merged["all"].read()[:, :, 0], [[0, 100, 101, 1], [2, 102, 103, 3]]
    )
    back = merge.reverse_op.convert(merged, ["all"], ["q", "kv"])
    np.testing.assert_array_equal(back["q"].read(), queries.array)
    np.testing.assert_array_equal(back["kv"].read(), others.array)


def one(*shape: int) -> Source:
    return lazy(np.zeros(shape, np.float32))


REFUSED = {
    "more pieces than elements": (ops.Chunk(), {"a": one(2, 2)}, ["x", "y", "z"]),
    "pieces without a number": (ops.Chunk(0, "parts"), {"a": one(2, 2)}, ["x.*"]),
    "a dimension that is not there": (ops.Chunk(2), {"a": one(2, 2)}, ["x", "y"]),
    "two tensors for one": (ops.Chunk(), {"a": [one(2, 2), one(2, 2)]}, ["x", "y"]),
    "no shapes to cut to": (ops.Split(), {"a": one(2, 2)}, ["x", "y"]),
    "nothing to join": (ops.Concatenate(), {}, ["x"]),
    "sides that differ": (ops.Concatenate(), {"a": [one(2, 2), one(2, 3)]}, ["x"]),
    "experts that differ": (ops.MergeModulelist(), {"a": [one(2, 2), one(2, 3)]}, ["x"]),
    "names that are equal": (ops.SplitModulelist(), {"a": one(2, 2)}, ["x"]),
    "an odd number in pairs": (ops.Interleave(), {"a": one(3, 2)}, ["x"]),
    "a bias without a second axis": (ops.Transpose(), {"a": one(3)}, ["x"]),
    "a kernel of another size": (ops.LinearToConv3d(3, (1, 2, 2)), {"a": one(2, 13)}, ["x"]),
    "heads that do not fit": (ops.PermuteForRope(), {"a": one(7, 2)}, ["x"]),
    "one of two sources": (ops.ErnieFuseAndSplitTextVisionExperts(), {"b": experts(2)}, ["x", "y"]),
    "no vocabulary size": (ops.UnpadVocab(), {"a": one(3, 2)}, ["x"]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_one_clear_error_says_what_does_not_fit(why: str):
    operation, tensors, targets = REFUSED[why]
    with pytest.raises(FlaxenError, match=r"\w+ .*\d|found|differ|named|does not have"):
        operation.convert(tensors, ["a"], targets, config=SimpleNamespace())


def test_a_matrix_that_has_the_models_shape_is_not_transposed():
    turn = ops.Transpose(check_dims=True)
    for shape, wanted in [((3, 2), (3, 2)), ((2, 3), (3, 2))]:
        found = turn.convert(
            {"a": lazy(np.zeros(shape))}, ["a"], ["x"], full_layer_name="x", shapes={"x": wanted}
        )
        assert found["x"].shape == wanted
