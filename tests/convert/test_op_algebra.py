"""Chains of conversion operations: any box, both ways, on any mesh, reading no byte too many."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
from counting import Source
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxen.convert import ops
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.place import boxes, place

DTYPES = [np.float32, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
SIZES = [1, 2, 3, 4, 6, 8]
EVEN_SIZES = [2, 4, 8]
CONFIG = SimpleNamespace(num_attention_heads=2)


@dataclasses.dataclass
class Chain:
    """Operations of one converter, what they are given and what must come out."""

    steps: list[ops.ConversionOps]
    sources: list[str]
    targets: list[str]
    given: dict[str, list[np.ndarray]]
    expected: dict[str, np.ndarray]

    def sources_of(self, shows: bool) -> dict[str, list[Source]]:
        return {key: [Source(a, shows) for a in found] for key, found in self.given.items()}

    def forward(self, sources: dict[str, list[Source]]) -> dict[str, LazyTensor]:
        tensors: ops.Tensors = {key: list(found) for key, found in sources.items()}
        return run(self.steps, tensors, self.sources, self.targets, {})

    def backward(self, found: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        steps = [step.reverse_op for step in reversed(self.steps)]
        tensors: ops.Tensors = dict(found)
        if isinstance(self.steps[-1], ops.SplitModulelist):
            tensors = {self.targets[0]: list(found.values())}
        # Without a list of experts, the tensors of the checkpoint may be of several sizes.
        shapes = {key: arrays[0].shape for key, arrays in self.given.items() if "*" not in key}
        return run(steps, tensors, self.targets, self.sources, shapes)


def run(steps, tensors: ops.Tensors, sources, targets, shapes) -> dict[str, LazyTensor]:
    for step in steps:
        tensors = step.convert(
            tensors,
            sources,
            targets,
            full_layer_name=targets[0],
            config=CONFIG,
            shapes=shapes,
        )
    return {key: t[0] if isinstance(t, list) else t for key, t in tensors.items()}


def sorted_pairs(array: np.ndarray, dim: int, heads: int, inverse: bool) -> np.ndarray:
    """By the row that each row comes from, one at a time."""
    size = array.shape[dim]
    width = size // heads
    half = width // 2
    comes_from = []
    for row in range(size):
        head, i = divmod(row, width)
        inside = (i % 2) * half + i // 2 if inverse else 2 * (i % half) + i // half
        comes_from.append(head * width + inside)
    return np.take(array, comes_from, axis=dim)


class Building:
    """A chain while it is drawn; `array` is what it makes, by NumPy."""

    def __init__(self, draw, array: np.ndarray, steps: list[ops.ConversionOps]):
        self.draw, self.array, self.steps = draw, array, steps

    def dim(self) -> int:
        return self.draw(st.integers(0, self.array.ndim - 1))

    def transpose(self) -> None:
        a, b = self.dim(), self.dim()
        self.steps.append(ops.Transpose(a, b - self.array.ndim))
        self.array = np.swapaxes(self.array, a, b)

    def interleave(self) -> None:
        dim, inverse = self.dim(), self.draw(st.booleans())
        if self.array.shape[dim] % 2 == 0:
            self.steps.append(ops.Interleave(dim, inverse))
            self.array = sorted_pairs(self.array, dim, 1, inverse)

    def rope(self) -> None:
        inverse = self.draw(st.booleans())
        if self.array.ndim <= 2 and self.array.shape[0] % 4 == 0:
            self.steps.append(ops.PermuteForRope(inverse=inverse))
            self.array = sorted_pairs(self.array, 0, CONFIG.num_attention_heads, inverse)

    def convolution(self) -> None:
        if self.array.ndim == 2:
            kernel = (1, 1, self.array.shape[1])
            self.steps.append(ops.LinearToConv3d(1, kernel))
            self.array = self.array.reshape(self.array.shape[0], 1, *kernel)
        elif self.array.ndim == 5:
            shape = self.array.shape
            self.steps.append(ops.Conv3dToLinear(shape[1], shape[2:]))
            self.array = self.array.reshape(shape[0], math.prod(shape[1:]))

    def end(self, may_cut: bool) -> tuple[list[str], dict[str, np.ndarray]]:
        """The target patterns and the results, of which there may be several."""
        kind = self.draw(st.sampled_from(["whole", "chunk", "list"])) if may_cut else "whole"
        dim = self.dim()
        size = self.array.shape[dim]
        if kind == "chunk":
            each = self.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            cuts = range(each, size, each)
            parts = np.split(self.array, list(cuts), dim)
            targets = [f"ours.{i}" for i in range(len(parts))]
            self.steps.append(ops.Chunk(dim))
            return targets, dict(zip(targets, parts, strict=True))
        if kind == "list" and self.array.ndim > 1:
            self.steps.append(ops.SplitModulelist(dim))
            parts = [np.take(self.array, i, axis=dim) for i in range(size)]
            return ["ours.*"], {f"ours.{i}": part for i, part in enumerate(parts)}
        return ["ours"], {"ours": self.array}


def random_array(seed: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)


@st.composite
def chains(draw, sizes=SIZES) -> Chain:
    """Tensors (or lists of experts) of one or several patterns, joined, turned about, cut."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3))
    experts, count = draw(st.sampled_from([0, 0, 1, 2, 4])), draw(st.integers(1, 3))
    joined = draw(st.integers(0, len(shape) - (not experts)))
    given = {}
    for key in range(count):
        own = list(shape)
        if not experts and sizes is SIZES:
            own[joined] = draw(st.sampled_from(sizes))
        each = [random_array(100 * key + i, tuple(own), dtype) for i in range(experts or 1)]
        given[f"e.*.w{key}" if experts else f"w{key}"] = each
    steps: list[ops.ConversionOps] = []
    arrays = [found[0] for found in given.values()]
    if experts:
        dim = draw(st.integers(0, len(shape)))
        steps.append(ops.MergeModulelist(dim))
        arrays = [np.stack(found, dim) for found in given.values()]
    if count > 1:
        steps.append(ops.Concatenate(joined))
        arrays = [np.concatenate(arrays, joined)]
    building = Building(draw, arrays[0], steps)
    turns = st.sampled_from(["transpose", "interleave", "rope", "convolution"])
    for name in draw(st.lists(turns, max_size=4)):
        getattr(building, name)()
    if not steps:
        building.transpose()
    targets, expected = building.end(may_cut=count == 1 and not experts)
    return Chain(steps, list(given), targets, given, expected)


def some_box(draw, shape: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(slice(s, draw(st.integers(s + 1, n))) for s, n in zip(starts, shape, strict=True))


def bits(array: np.ndarray) -> np.ndarray:
    """NaN differs from itself; its bits do not."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def total(sources: dict[str, list[Source]]) -> int:
    return sum(source.counter.total for found in sources.values() for source in found)


@settings(max_examples=200, deadline=None)
@given(chains(), st.booleans(), st.data())
def test_any_box_of_a_chain_is_that_box_of_its_values_and_reads_no_more(chain, shows, data):
    event(" ".join(type(step).__name__ for step in chain.steps))
    sources = chain.sources_of(shows)
    found = chain.forward(sources)
    assert list(found) == list(chain.expected)
    for key, want in chain.expected.items():
        box, before = some_box(data.draw, want.shape), total(sources)
        values = found[key].read(box)
        np.testing.assert_array_equal(bits(values), bits(want[box]))
        assert total(sources) - before == values.nbytes


@settings(max_examples=100, deadline=None)
@given(chains(), st.data())
def test_a_chain_undoes_itself_bit_by_bit(chain, data):
    sources = chain.sources_of(shows=False)
    back = chain.backward(chain.forward(sources))
    originals = {
        key.replace("*", str(i)): array
        for key, found in chain.given.items()
        for i, array in enumerate(found)
    }
    assert sorted(back) == sorted(originals)
    for key, want in originals.items():
        box, before = some_box(data.draw, want.shape), total(sources)
        values = back[key].read(box)
        np.testing.assert_array_equal(bits(values), bits(want[box]))
        assert total(sources) - before == values.nbytes
        np.testing.assert_array_equal(bits(back[key].read()), bits(want))


@st.composite
def shardings(draw, shape: tuple[int, ...]) -> NamedSharding:
    sizes = draw(st.sampled_from([(8,), (2, 4), (2, 2, 2)]))
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), [f"m{i}" for i in range(len(sizes))])
    free, spec = dict(mesh.shape), []
    for n in shape:
        fitting = [None, *(name for name, size in free.items() if n % size == 0)]
        name = draw(st.sampled_from(fitting))
        free.pop(name, None)
        spec.append(name)
    return NamedSharding(mesh, PartitionSpec(*spec))


@settings(max_examples=50, deadline=None)
@given(chains(EVEN_SIZES), st.booleans(), st.data())
def test_every_device_of_a_mesh_gets_its_box_and_each_byte_of_those_is_read_once(
    chain, shows, data
):
    sources = chain.sources_of(shows)
    found = chain.forward(sources)
    where = {key: data.draw(shardings(t.shape), key) for key, t in found.items()}
    arrays = place(found, where)
    wanted = 0
    for key, array in arrays.items():
        for shard in array.addressable_shards:
            mine = chain.expected[key][shard.index]
            np.testing.assert_array_equal(bits(np.asarray(shard.data)), bits(mine))
        size = found[key].dtype.itemsize
        wanted += sum(volume(box) * size for box, _ in boxes(where[key], array.shape))
    assert total(sources) == wanted


def volume(box: tuple[slice, ...]) -> int:
    return math.prod(s.stop - s.start for s in box)
