"""Each conversion operation against recorded results of Transformers 5.24 on torch."""

from __future__ import annotations

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden import DATA

from flaxen.convert import ops
from flaxen.convert.arrays import ArrayTensor
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
