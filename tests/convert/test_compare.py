"""How far apart two checkpoints are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.compare import compare


def lazy(**arrays):
    return {name: ArrayTensor(array) for name, array in arrays.items()}


@pytest.fixture
def values():
    return np.random.default_rng(0).standard_normal((37, 11)).astype(np.float32)


def test_equal_checkpoints_are_the_same(values):
    found = compare(lazy(a=values, b=values[0]), lazy(b=values[0].copy(), a=values.copy()))
    assert found.same and found.equal == 2


def test_names_in_one_alone_are_told_apart(values):
    found = compare(lazy(a=values, x=values), lazy(a=values, y=values))
    assert (found.only_first, found.only_second, found.equal) == (["x"], ["y"], 1)


def test_one_changed_element_is_found_and_measured(values, monkeypatch):
    monkeypatch.setattr("flaxen.convert.compare.SLAB", 64)
    other = values.copy()
    other[36, 10] += 0.5
    (found,) = compare(lazy(a=values), lazy(a=other)).different
    moved = abs(np.float64(other[36, 10]) - values[36, 10])
    assert (found.elements, found.size) == (1, values.size)
    assert found.largest == pytest.approx(moved)
    assert found.relative == pytest.approx(moved / np.linalg.norm(values.astype(np.float64)))


def test_another_dtype_with_equal_values_is_a_difference_of_zero_elements():
    a = np.arange(8, dtype=np.float32)
    (found,) = compare(lazy(a=a), lazy(a=a.astype(ml_dtypes.bfloat16))).different
    assert (found.dtypes, found.elements) == (("float32", "bfloat16"), 0)


def test_another_shape_is_not_compared_further(values):
    (found,) = compare(lazy(a=values), lazy(a=values.T)).different
    assert found.shapes == ((37, 11), (11, 37)) and found.largest == 0


def test_the_same_nan_is_equal_and_a_number_is_far_from_it():
    a = np.array([np.nan, 1.0, np.inf], np.float32)
    b = np.array([np.nan, np.nan, np.inf], np.float32)
    assert compare(lazy(a=a), lazy(a=a.copy())).same
    (found,) = compare(lazy(a=a), lazy(a=b)).different
    assert (found.elements, found.largest) == (1, np.inf)


def test_signed_zero_differs_in_bits_only():
    a, b = np.array([0.0], np.float32), np.array([-0.0], np.float32)
    (found,) = compare(lazy(a=a), lazy(a=b)).different
    assert (found.elements, found.largest) == (1, 0.0)


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn])
def test_every_kind_of_number_compares(kind):
    a = np.array([0, 1, 1, 0]).astype(kind)
    b = np.array([0, 1, 0, 0]).astype(kind)
    (found,) = compare(lazy(a=a), lazy(a=b)).different
    assert (found.elements, found.largest) == (1, 1.0)


def test_progress_adds_up_to_what_both_have(values):
    seen = []
    compare(lazy(a=values, b=values, c=values), lazy(a=values, b=values + 1), seen.append)
    assert sum(seen) == 2 * values.nbytes
