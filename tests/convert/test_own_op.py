"""Conversion operations that users write, beside ours in one chain."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from counting import Source
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxen.convert import ops
from flaxen.convert.ops.base import as_list
from flaxen.convert.place import place
from flaxen.convert.transforms import WeightConverter, reverted, transformed
from flaxen.convert.views import Computed
from flaxen.core.errors import CheckpointError


class Scale(ops.ConversionOps):
    """Multiply by a power of two, which loses nothing."""

    def __init__(self, by: float):
        self.by = by

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {
            key: [tensor.map(lambda values: values * self.by) for tensor in as_list(value)]
            for key, value in input_dict.items()
        }

    @property
    def reverse_op(self):
        return Scale(1 / self.by)


STEPS = [Scale(4.0), ops.MergeModulelist(), ops.Transpose(1, 2)]


def run(steps, tensors, sources, targets):
    for step in steps:
        tensors = step.convert(tensors, sources, targets)
    return tensors


def experts() -> list[Source]:
    rng = np.random.default_rng(0)
    return [Source(rng.standard_normal((8, 6)).astype(ml_dtypes.bfloat16)) for _ in range(4)]


def test_an_own_operation_is_computed_only_for_the_box_that_is_asked_for():
    each = experts()
    found = run(STEPS, {"e.*.w": list(each)}, ["e.*.w"], ["e.w"])["e.w"]
    values = found.read((slice(1, 3), slice(0, 2), slice(4, 8)))
    for i, value in zip((1, 2), values, strict=True):
        np.testing.assert_array_equal(value, 4 * each[i].array[4:8, :2].T)
    assert [expert.counter.total for expert in each] == [0, 16, 16, 0]


def test_a_chain_with_an_own_operation_is_undone_exactly():
    each = experts()
    found = run(STEPS, {"e.*.w": list(each)}, ["e.*.w"], ["e.w"])
    reverse = [step.reverse_op for step in reversed(STEPS)]
    back = run(reverse, found, ["e.w"], ["e.*.w"])
    for i, expert in enumerate(each):
        (tensor,) = as_list(back[f"e.{i}.w"])
        assert tensor.dtype == expert.dtype
        np.testing.assert_array_equal(tensor.read(), expert.array)


def test_each_device_computes_its_own_part_of_an_own_operation():
    each = experts()
    found = run(STEPS, {"e.*.w": list(each)}, ["e.*.w"], ["e.w"])
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ["ep", "tp"])
    array = place(found, NamedSharding(mesh, PartitionSpec("ep", None, "tp")))["e.w"]
    for shard in array.addressable_shards:
        expert, _, columns = shard.index
        want = 4 * each[expert.start].array[columns].T
        np.testing.assert_array_equal(np.asarray(shard.data)[0], want)
    assert [expert.counter.total for expert in each] == [expert.nbytes for expert in each]


def test_a_mapped_function_may_change_the_dtype():
    tensor = Source(np.array([1, 2, 3], np.int8)).map(lambda values: values / 2, np.float32)
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor.read(), [0.5, 1.0, 1.5])


def test_computed_values_may_depend_on_where_they_are():
    rows = Computed((6, 2), np.dtype(np.float32), lambda box: np.arange(6.0)[box[0], None])
    np.testing.assert_array_equal(rows.read((slice(2, 4), slice(0, 2))), [[2, 2], [3, 3]])


@pytest.mark.parametrize("function", [lambda x: x[:1, :1], lambda x: "text", lambda x: x.nothing])
def test_a_mapped_function_that_does_not_keep_the_shape_is_refused(function):
    with pytest.raises(CheckpointError, match="A function of"):
        Source(np.ones((4, 6), np.float32)).map(function).read()


class Odd(ops.ConversionOps):
    """Gives what it was made with."""

    def __init__(self, given):
        self.given = given

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return self.given


@pytest.mark.parametrize("given", [None, [1], {"w": np.ones(2)}, {"w": [[Source(np.ones(2))]]}])
def test_an_operation_that_gives_no_tensors_is_an_error_of_that_conversion(given):
    tensors = {"a.w": Source(np.ones(2))}
    view = transformed(tensors, [WeightConverter("w", "w", [Odd(given)])], {"a.w": (2,)})
    assert "not a dict from pattern to lazy tensors" in view.errors["a.w"]


def test_an_operation_without_a_reverse_says_so_when_it_is_to_be_undone():
    converter = WeightConverter("v", "w", [Odd({"w": Source(np.ones(2))})])
    view = transformed({"a.v": Source(np.ones(2))}, [converter], {"a.w": (2,)})
    with pytest.raises(CheckpointError, match="Odd has no `reverse_op`"):
        reverted(view, view.applied)
