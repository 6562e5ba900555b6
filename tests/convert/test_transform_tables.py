"""Any table of rules, on any checkpoint that it fits, is undone bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from named_tensors import equal

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.ops import Chunk, Concatenate, MergeModulelist, Transpose
from flaxen.convert.transforms import (
    WeightConverter,
    WeightRenaming,
    revert,
    reverted,
    transformed,
)


def stack_rule(m, fused):
    parts = [f"{m}.*.g", f"{m}.*.u"][: 1 + fused]
    ops = [MergeModulelist(0), Concatenate(1)][: 1 + fused]
    return WeightConverter(parts, f"{m}.stacked", ops)


RULES = {
    "same": lambda m: [],
    "rename": lambda m: [WeightRenaming(f"{m}.old", f"{m}.new")],
    "turn": lambda m: [WeightConverter(f"{m}.old", f"{m}.new", [Transpose(0, 1)])],
    "cut": lambda m: [WeightConverter(f"{m}.qkv", [f"{m}.{n}" for n in "qkv"], [Chunk(0)])],
    "join": lambda m: [WeightConverter([f"{m}.q", f"{m}.k"], f"{m}.qk", [Concatenate(0)])],
    "stack": lambda m: [stack_rule(m, fused=False)],
    "fuse": lambda m: [stack_rule(m, fused=True)],
}


def checkpoint_of(kind, at, rows, count):
    """Names and shapes in the checkpoint, and in the model."""
    one, experts = (rows, 2), range(count)
    return {
        "same": ({f"{at}.w": one}, {f"{at}.w": one}),
        "rename": ({f"{at}.old": one}, {f"{at}.new": one}),
        "turn": ({f"{at}.old": one}, {f"{at}.new": (2, rows)}),
        "cut": ({f"{at}.qkv": (3 * rows, 2)}, {f"{at}.{n}": one for n in "qkv"}),
        "join": ({f"{at}.{n}": one for n in "qk"}, {f"{at}.qk": (2 * rows, 2)}),
        "stack": ({f"{at}.{i}.g": one for i in experts}, {f"{at}.stacked": (count, rows, 2)}),
        "fuse": (
            {f"{at}.{i}.{n}": one for i in experts for n in "gu"},
            {f"{at}.stacked": (count, 2 * rows, 2)},
        ),
    }[kind]


@st.composite
def tables(draw):
    """Rules for a few modules, a checkpoint in any order of keys, the shapes of the model."""
    rules, shapes, names = [], {}, {}
    for module in draw(st.permutations(["alpha", "beta", "gamma", "delta"])):
        kind = draw(st.sampled_from(sorted(RULES)))
        rows, count = draw(st.integers(1, 4)), draw(st.integers(1, 12))
        rules += RULES[kind](module)
        for layer in draw(st.sets(st.sampled_from([0, 2, 10]), min_size=1)):
            theirs, ours = checkpoint_of(kind, f"l.{layer}.{module}", rows, count)
            shapes, names = shapes | theirs, names | ours
    values = np.random.default_rng(len(shapes))
    keys = draw(st.permutations(sorted(shapes)))
    return rules, {key: ArrayTensor(values.random(shapes[key])) for key in keys}, names


@settings(deadline=None, max_examples=40)
@given(tables())
def test_what_any_table_does_is_undone_bit_for_bit(table):
    rules, tensors, names = table
    view = transformed(tensors, rules, names)
    assert (view.errors, view.unexpected) == ({}, [])
    assert {name: tensor.shape for name, tensor in view.items()} == names
    assert equal(reverted(view, view.applied), tensors)
    assert equal(revert(dict(view), rules), tensors)
