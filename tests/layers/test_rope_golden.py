"""Frequencies and their history against what Transformers on torch computes."""

from __future__ import annotations

import json
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA

from flaxen.core.errors import ConfigError
from flaxen.families.config import hf_config
from flaxen.layers.rope import Rope, rope
from flaxen.layers.rope_update import StatefulRope, dynamic_rope_update

CASES = json.loads((DATA / "unit" / "rope.json").read_text())["cases"]
TABLES = np.load(DATA / "unit" / "rope.npz")
STATEFUL = np.load(DATA / "unit" / "rope_stateful.npz")
SOUND = [case for case in CASES if case["error"] is None]
named = {"ids": lambda case: case["name"]}


def raw(case) -> dict:
    given = case["rope_parameters_in"]
    more = {} if given is None else {"rope_parameters": given}
    return {"model_type": "llama", **case["config"], **more}


def made(case) -> Rope:
    sizes = case["config"]
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    leftover = case["name"] == "linear_extra_key"
    with pytest.warns(match="do not use beta_fast") if leftover else nullcontext():
        return rope(case["rope_parameters_out"], head_dim, sizes["max_position_embeddings"])


@pytest.mark.parametrize("case", SOUND, **named)
def test_frequencies_for_every_length(case):
    r, name = made(case), case["name"]
    for length in (None, 1, 64, 128, 129, 512):
        inv, scale = r.frequencies(length)
        np.testing.assert_allclose(inv, TABLES[f"{name}/seq={length}/inv_freq"], rtol=1e-6)
        assert scale == TABLES[f"{name}/seq={length}/attention_factor"]
        assert inv.dtype == np.float32


@pytest.mark.parametrize("case", SOUND, **named)
def test_what_the_config_class_makes_of_a_file(case):
    assert hf_config(raw(case)).rope_parameters == case["rope_parameters_out"]


@pytest.mark.parametrize("case", [c for c in CASES if c["error"]], **named)
def test_what_transformers_cannot_build_is_an_error(case):
    with pytest.raises(ConfigError):
        rope(hf_config(raw(case)).rope_parameters, case["config"].get("head_dim", 16), 128)


LONG = next(case for case in CASES if case["name"] == "longrope")["rope_parameters_out"]
HISTORIES = {
    "dynamic": rope({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 16, 16),
    "longrope": rope({**LONG, "original_max_position_embeddings": 32}, 16, 128),
}
"""What the stored sequences of calls were made with."""


@jax.jit
@dynamic_rope_update
def forward(rotary, x, position_ids):
    return [jnp.concatenate([table, table], -1) for table in rotary.tables(position_ids)]


@pytest.mark.parametrize("kind", HISTORIES)
def test_a_sequence_of_calls_remembers_as_transformers_does(kind):
    state, compare = StatefulRope.start(HISTORIES[kind]), np.testing.assert_allclose
    for call in range(sum(name.endswith("len") for name in STATEFUL if name.startswith(kind))):
        want = {x: STATEFUL[f"{kind}/{call}/{x}"] for x in ("len", "inv_freq", "cos", "sin")}
        positions = jnp.arange(want["len"])[None]
        (cos, sin), state = forward(state, None, positions)
        assert state.max_seq_len_cached == STATEFUL[f"{kind}/{call}/max_seq_len_cached"]
        compare(state.inv_freq, want["inv_freq"], rtol=1e-6)
        compare(cos, want["cos"], atol=2e-6)
        compare(sin, want["sin"], atol=2e-6)


def test_history_is_the_only_difference_between_dynamic_tables():
    """40 positions, then 16: a text of 16 alone has the first frequencies."""
    r, short = HISTORIES["dynamic"], jnp.arange(16)[None]
    state = StatefulRope.start(r).update(jnp.arange(40)[None]).update(short)
    later, fresh = state.tables(short)[0], r.tables(short)[0]
    np.testing.assert_array_equal(fresh, StatefulRope.start(r).update(short).tables(short)[0])
    assert np.abs(later - fresh).max() > 0.5


def test_each_layer_type_has_a_history_of_its_own():
    start = StatefulRope.start(HISTORIES["dynamic"])
    update = dynamic_rope_update(lambda rotary, x, position_ids: x * rotary.max_seq_len_cached)
    states = {"full_attention": start, "sliding_attention": start}
    got, states = update(states, 2, jnp.arange(30)[None], layer_type="full_attention")
    assert got == 60
    assert states["full_attention"].max_seq_len_cached == 30
    assert states["sliding_attention"].max_seq_len_cached == 16


def test_other_types_keep_their_frequencies():
    start = StatefulRope.start(rope({"rope_theta": 1e4}, 16, 16))
    assert start.update(jnp.arange(99)[None]) is start
