"""Copies between strided arrays, against assignment."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxen.convert.lazy import copy


@st.composite
def cuts(draw):
    """A box, perhaps with its axes in another order, of an array of up to four axes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    starts = [draw(st.integers(0, n)) for n in shape]
    stops = [draw(st.integers(s, n)) for s, n in zip(starts, shape, strict=True)]
    return shape, tuple(map(slice, starts, stops)), draw(st.permutations(range(len(shape))))


@given(cuts(), st.sampled_from([np.float32, ml_dtypes.bfloat16, np.bool_]), st.booleans())
def test_any_box_of_any_order_is_copied_and_nothing_else(cut, dtype, fresh):
    shape, box, order = cut
    source = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    around = np.zeros_like(source)
    wanted = around.copy()
    wanted[box] = source[box]
    part = source[(*box, ...)].transpose(order)
    out = np.zeros(part.shape, dtype) if fresh else around[(*box, ...)].transpose(order)
    copy(out, part)
    np.testing.assert_array_equal(out, part)
    if not fresh:
        np.testing.assert_array_equal(around, wanted)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.bfloat16, np.complex64])
def test_runs_of_a_read_only_map_are_copied_whole(dtype):
    source = np.arange(6 * 8 * 3).reshape(6, 8, 3).astype(dtype)
    source.flags.writeable = False
    out = np.zeros((6, 2, 3), dtype)
    copy(out, source[:, 3:5])
    np.testing.assert_array_equal(out, source[:, 3:5])
