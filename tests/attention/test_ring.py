"""Rings of one and of many devices against float64 NumPy, gradients included."""

from __future__ import annotations

import dataclasses

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rings import N, arrays, call, run, scene

from flaxen.attention import NOTHING, Extras, Mask, Specs, choose
from flaxen.core.errors import ConfigError
from flaxen.shard import Plan


def agrees(c, where, extras=NOTHING, dtype="float32", bound=1e-5):
    q, k, v, grad = arrays(c, dtype)
    got = run(c, where, q, k, v, grad, extras)
    where = jax.tree.map(np.asarray, where)
    wanted = reference.gradients(q, k, v, c, where, grad, extras)
    wanted["out"] = reference.attention(q, k, v, c, where, extras)
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        size = 1 if name == "out" else 3 * max(1, abs(want).max())
        np.testing.assert_allclose(got[name], want, rtol=0, atol=bound * size, err_msg=name)


LEFT = jnp.arange(129) >= jnp.array([[40], [0]])
RIGHT = jnp.arange(129) < jnp.array([[70], [129]])
DOCUMENTS = jnp.arange(129) // jnp.array([[50], [31]])
PACKED = {"q_segments": DOCUMENTS, "k_segments": DOCUMENTS}
BOTH_WAYS = Mask(causal=False, window=20, prefix=True)
EVERYTHING = Extras(
    bias=jnp.asarray(np.random.default_rng(1).standard_normal((1, N, 129, 129)), jnp.float32),
    slopes=jnp.array([0.5, 0.25, 0.1, 0.0]),
    sinks=jnp.array([1.0, -1.0, 0.0, 2.0]),
)


@pytest.mark.parametrize(
    ("how", "parts", "extras"),
    [
        ({"mesh": None}, {"keep": LEFT}, NOTHING),
        ({"mesh": "sp=8", "K": 1, "mask": Mask(window=40), "V": 5}, {"keep": RIGHT}, NOTHING),
        ({"mesh": "sp=2,tp=2,fsdp=2", "softcap": 2.0}, {"keep": LEFT}, EVERYTHING),
        ({"mesh": "sp=2,tp=4", "balanced": True, "scan_ring": False}, {}, EVERYTHING),
        ({"mesh": "sp=4", "mask": BOTH_WAYS}, {"prefix": jnp.array([70, 3])}, NOTHING),
        ({"mesh": "sp=4", "mechanism": "local_ring", "mask": Mask(window=40)}, {}, NOTHING),
        ({"mesh": "sp=4", "mechanism": "wise_ring", "mask": Mask(chunk=30)}, PACKED, NOTHING),
    ],
)
def test_output_and_gradients_equal_float64(how, parts, extras):
    c = call(129, **how)
    agrees(c, scene(c, **parts), extras)


def test_a_sequence_shorter_than_the_ring():
    c = call(1, "sp=4")
    agrees(c, scene(c))


@pytest.mark.parametrize(("T", "mesh"), [(3, "sp=2,tp=2,fsdp=2"), (20, "sp=4")], ids=str)
def test_new_queries_see_a_cache_that_is_cut(T, mesh):
    """At first they are shown to all devices; where they are many, keys turn."""
    c = call(T, mesh, S=37)
    keep = jnp.arange(37) < jnp.array([[36], [9]])
    where = scene(c, q_slots=jnp.arange(37)[-T:], keep=keep)
    agrees(c, where, Extras(slopes=EVERYTHING.slopes, sinks=EVERYTHING.sinks))


def test_bfloat16_is_close():
    c = call(40, "sp=4")
    agrees(dataclasses.replace(c, dtype="bfloat16"), scene(c), dtype="bfloat16", bound=2e-2)


@pytest.mark.parametrize("T", [40, 1])
def test_keys_that_nobody_sees_may_hold_anything(T):
    """Of two rows one sees nothing at all; gradients stay finite and zero there."""
    c = call(T, "sp=4", S=40 if T == 1 else None)
    keep = (jnp.arange(40) % 7 > 1) & jnp.array([[True], [False]])
    where = scene(c, keep=keep, q_slots=jnp.arange(40)[-T:])
    q, k, v, grad = arrays(c)
    clean = run(c, where, q, k, v, grad, NOTHING)
    dirty = (jnp.where(keep[..., None, None], x, jnp.nan) for x in (k, v))
    for name, got in run(c, where, q, *dirty, grad, NOTHING).items():
        np.testing.assert_array_equal(got, clean[name])
        np.testing.assert_array_equal(got[1], 0)


def test_causality_comes_from_slots_and_not_from_the_order_of_devices():
    c, slots = call(24, "sp=4", S=24), jnp.asarray(np.random.default_rng(3).permutation(24))
    where = scene(c, q_slots=slots, k_slots=slots)
    q, k, v, _ = arrays(c)
    got = jax.jit(lambda *args: choose(c).attend(*args, c, where))(q, k, v)
    np.testing.assert_allclose(got, reference.attention(q, k, v, c, where), atol=1e-5)


def test_the_ring_turns_around_the_axis_that_is_named():
    plan = Plan({}, {"seq": "ring", "batch": "rows"})
    c = call(21, "rows=2,ring=4", plan=plan, axis="ring")
    q, k, v, _ = arrays(c)
    program = jax.jit(lambda *args: choose(c).attend(*args, c, scene(c))).lower(q, k, v)
    want = reference.attention(q, k, v, c, scene(c))
    np.testing.assert_allclose(program.compile()(q, k, v), want, atol=1e-5)
    text = program.as_text()
    assert "[[0, 1], [1, 2], [2, 3], [3, 0], [4, 5], [5, 6], [6, 7], [7, 4]]" in text


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match="dropout"):
        choose(call(8, "sp=4", dropout=0.1))


@pytest.mark.parametrize(
    ("wins", "how"),
    [
        (True, {"mesh": "sp=4"}),
        (True, {"mesh": "sp=2,tp=2,fsdp=2"}),
        (True, {"mesh": "tp=4", "axis": "tp", "specs": Specs(query=P(None, "tp"))}),
        (False, {"mesh": None}),
        (False, {"mesh": "tp=4"}),
        (False, {"mesh": "sp=4", "axis": "tp"}),
        (True, {"mesh": "sp=4", "S": 90}),
        (False, {"mesh": "sp=4", "dropout": 0.1}),
    ],
)
def test_auto_takes_the_ring_where_the_sequence_or_its_cache_is_cut(wins, how):
    assert (choose(call(64, mechanism="auto", **how)).name == "ring") == wins
