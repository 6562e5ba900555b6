"""Which dtype a weight becomes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flaxen.convert.dtypes import dtype_plan, float_dtype
from flaxen.core.errors import ConfigError

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


@pytest.mark.parametrize(
    "name, found",
    [
        ("model.layers.3.mlp.router.weight", F32),
        ("model.layers.3.mlp.gate.e_score_bias", F32),
        ("model.norm.weight", BF16),
    ],
)
def test_the_first_pattern_found_in_a_name_counts(name, found):
    plan = dtype_plan({"router": "float32", "gate.*bias": "float32", "*": "bfloat16"})
    assert plan.of(name, np.dtype(np.float16)) == found
    assert plan.main == BF16


def test_what_no_pattern_names_stays_as_stored():
    plan = dtype_plan({"norm": "float32"})
    assert plan.of("lm_head.weight", BF16) == BF16
    assert plan.main is None


@pytest.mark.parametrize("stored", [np.int32, np.bool_, np.uint8])
def test_integers_and_booleans_stay(stored):
    assert dtype_plan("bfloat16").of("x", np.dtype(stored)) == stored


def test_a_point_in_a_pattern_is_a_point():
    assert dtype_plan({"a.b": "float32"}).of("aXb", BF16) == BF16


def test_an_unknown_dtype_in_a_plan_offers_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        dtype_plan({"norm": "float23"})


def test_what_is_no_dtype_is_refused_by_name():
    with pytest.raises(ConfigError, match="Unknown dtype"):
        float_dtype({"*": "bfloat16"})
