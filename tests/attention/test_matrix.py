"""Every mechanism on every mesh against float64; `make exactness` measures all cases."""

from __future__ import annotations

import itertools

import pytest
from attention_matrix import CASES, MESHES, measure

from flaxen.attention import MECHANISMS

QUICK = [name for name in CASES if name != "length 1025"]

# Each mechanism has other cases on other meshes, so that together they have all of both.
MIXED = MESHES["float32"]
CELLS = [
    (mechanism, MIXED[(i + 3 * j) % len(MIXED)], QUICK[(5 * i + 7 * j) % len(QUICK)])
    for (i, mechanism), j in itertools.product(enumerate(MECHANISMS), range(2))
]


@pytest.mark.parametrize(("mechanism", "mesh", "case"), CELLS)
def test_is_exact_or_refuses_with_a_reason(mechanism, mesh, case):
    found = measure(CASES[case], mechanism, mesh, "float32")
    if isinstance(found, str):
        assert len(found.split()) > 2
    else:
        assert max(found) <= 1e-5
