"""Views of lazy tensors against the same operations on arrays in memory."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from counting import Source
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.lazy import Box, LazyTensor, concat, copy, is_float, stack
from flaxen.convert.views import slabs


def split(draw, size: int) -> list[int]:
    factors = []
    while size > 1:
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        factors.append(draw(st.sampled_from(divisors)))
        size //= factors[-1]
    return factors + draw(st.sampled_from([[], [1]]))


def some_box(draw, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(slice(s, draw(st.integers(s + 1, n))) for s, n in zip(starts, shape, strict=True))


@st.composite
def chains(draw):
    """A lazy chain, what it must equal, and its sources."""
    shows = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    sources: list[Source] = []

    def source(like: tuple[int, ...]) -> tuple[LazyTensor, np.ndarray]:
        base = 1000 * len(sources)
        array = (base + np.arange(np.prod(like), dtype=np.int32)).reshape(like)
        sources.append(Source(array, shows))
        return sources[-1], array

    lazy, array = source(shape)
    for _ in range(draw(st.integers(1, 5))):
        operation = draw(st.sampled_from(["reshape", "permute", "crop", "concat", "stack"]))
        if operation == "reshape":
            new = tuple(split(draw, array.size)) or (1,)
            lazy, array = lazy.reshape(new), array.reshape(new)
        elif operation == "permute":
            order = draw(st.permutations(range(array.ndim)))
            lazy, array = lazy.permute(order), array.transpose(order)
        elif operation == "crop":
            box = some_box(draw, array.shape)
            lazy, array = lazy.crop(box), array[box]
        elif array.size < 300:
            other, values = source(array.shape)
            if operation == "stack":
                lazy, array = stack([lazy, other]), np.stack([array, values])
            else:
                dim = draw(st.integers(0, array.ndim - 1))
                lazy, array = concat([lazy, other], dim), np.concatenate([array, values], dim)
    return lazy, array, sources, some_box(draw, array.shape)


@settings(max_examples=300, deadline=None)
@given(chains())
def test_any_box_of_any_chain_equals_the_array_and_reads_no_byte_more(case):
    lazy, array, sources, box = case
    assert lazy.shape == array.shape
    np.testing.assert_array_equal(lazy.read(box), array[box])
    assert sum(s.counter.total for s in sources) == array[box].nbytes


@settings(max_examples=150, deadline=None)
@given(chains())
def test_a_strided_target_is_filled_in_place(case):
    lazy, array, _, box = case
    want = array[box]
    target = np.zeros((*want.shape[::-1], 2), want.dtype)[..., 0].T
    assert lazy.read(box, target) is target
    np.testing.assert_array_equal(target, want)


@settings(max_examples=100, deadline=None)
@given(chains())
def test_a_view_is_the_same_memory_or_nothing(case):
    lazy, array, sources, box = case
    seen = lazy.view(box)
    event("seen" if seen is not None else "not seen")
    if seen is not None:
        np.testing.assert_array_equal(seen, array[box])
        assert any(np.shares_memory(seen, s.array) for s in sources)


def test_part_of_every_head_is_cut_out_of_a_flat_dimension():
    rows = np.arange(4 * 12 * 5, dtype=np.float32).reshape(48, 5)
    source = Source(rows, shows_memory=False)
    box = (slice(1, 3), slice(2, 9), slice(0, 5))
    got = source.reshape((4, 12, 5)).read(box)
    np.testing.assert_array_equal(got, rows.reshape(4, 12, 5)[box])
    assert source.counter.total == 2 * 7 * 5 * 4


def test_shapes_without_a_common_factorisation_reshape_too():
    array = np.arange(36, dtype=np.int16).reshape(4, 9)
    box = (slice(1, 5), slice(2, 5))
    got = Source(array, shows_memory=False).reshape((6, 6)).read(box)
    np.testing.assert_array_equal(got, array.reshape(6, 6)[box])


@pytest.mark.parametrize("width", [(), (16,)], ids=["bias", "weight"])
def test_a_rotary_row_permutation_is_undone_bit_for_bit(width):
    heads, half = 4, 4
    weight = np.random.default_rng(0).normal(size=(heads * 2 * half, *width)).astype(np.float32)

    def interleaved(tensor, inner):
        """Rows of each head from (a, b) order of `inner` to (b, a)."""
        split = tensor.reshape((heads, *inner, *width))
        order = [0, 2, 1, *range(3, 3 + len(width))]
        return split.permute(order).reshape((heads * 2 * half, *width))

    forth = interleaved(ArrayTensor(weight), (2, half))
    want = weight.reshape(heads, 2, half, *width).swapaxes(1, 2).reshape(weight.shape)
    assert forth.read().tobytes() == want.tobytes()
    assert interleaved(forth, (half, 2)).read().tobytes() == weight.tobytes()


def test_conversion_rounds_as_numpy_does_and_keeps_its_intermediate_small():
    array = np.random.default_rng(0).normal(size=(3000, 1001)).astype(np.float32)
    largest = []

    class Watching(Source):
        def fill(self, box: Box, out: np.ndarray) -> None:
            largest.append(out.nbytes)
            super().fill(box, out)

    got = Watching(array, shows_memory=False).astype(ml_dtypes.bfloat16).read()
    np.testing.assert_array_equal(got, array.astype(ml_dtypes.bfloat16))
    assert max(largest) <= 1 << 21 < array.nbytes


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 40))
def test_slabs_tile_the_box(shape, limit):
    seen = np.zeros(shape, int)
    box = tuple(slice(7, 7 + n) for n in shape)
    for part, place in slabs(box, 1, limit):
        assert seen[place].size <= limit
        assert [s.start - 7 for s in part] == [s.start for s in place]
        seen[place] += 1
    assert (seen == 1).all()


def test_a_sharded_jax_array_is_read_shard_by_shard():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    values = np.arange(16 * 6, dtype=np.float32).reshape(16, 6)
    sharded = jax.device_put(values, jax.NamedSharding(mesh, jax.P("a", "b")))
    box = (slice(3, 13), slice(2, 6))
    np.testing.assert_array_equal(ArrayTensor(sharded).read(box), values[box])
    assert sharded._npy_value is None


def test_fresh_memory_is_aligned_for_xla():
    assert ArrayTensor(np.zeros(7, np.int8)).read().ctypes.data % 64 == 0


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float16", "f8"])
def test_floats_are_floats(name):
    assert is_float(np.dtype(getattr(ml_dtypes, name, name)))


@pytest.mark.parametrize("name", ["int4", "int32", "bool", "complex64"])
def test_nothing_else_is_a_float(name):
    assert not is_float(np.dtype(getattr(ml_dtypes, name, name)))


def test_scalars_and_empty_tensors_read():
    one = ArrayTensor(np.array(3, np.float32))
    assert one.read() == one.astype("float64").reshape((1, 1)).reshape(()).read() == 3
    assert one.view() is None or one.view() == 3
    assert stack([one, one]).read().tolist() == [3, 3]
    assert ArrayTensor(np.zeros((0, 4), np.int8)).reshape((4, 0)).read().shape == (4, 0)
    assert ArrayTensor(np.zeros((2, 3))).reshape((6,)).read((slice(2, 2),)).shape == (0,)


def test_tensors_that_differ_do_not_join():
    a, b = ArrayTensor(np.zeros((2, 3))), ArrayTensor(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="differ"):
        stack([a, b])
    assert concat([a, b], 1).shape == (2, 7)


def test_a_large_transposed_copy_moves_every_element():
    values = np.arange(600 * 701, dtype=np.float32).reshape(600, 701)
    out = np.zeros((701, 600), np.float64)
    copy(out, values.T)
    np.testing.assert_array_equal(out, values.T)
