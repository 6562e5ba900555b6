"""Attention on a mesh: each device's part of the arrays, against float64 NumPy on the whole."""

from __future__ import annotations

import dataclasses

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import case
from jax.sharding import PartitionSpec as P

from flaxen.attention import MECHANISMS, NOTHING, AttentionSettings, Mask, Specs
from flaxen.attention.shards import query_spec
from flaxen.shard import Placement, make_mesh, plan_named

FULL = {
    "length": 12,
    "keep": ["001111111111", "111111111100"],
    "segments": ["000001111122", "011122222222"],
    "extras": ("bias", "slopes", "sinks"),
}


def on(mesh, call, **settings):
    placement = Placement(make_mesh(mesh), plan_named("auto"))
    return dataclasses.replace(
        call, placement=placement, settings=AttentionSettings("sharded_vanilla", **settings)
    )


CASES = {
    "key heads over rows": ("fsdp=2,tp=4", case(Mask(window=5), heads=(8, 4), **FULL), {}),
    "fewer key heads than tp": ("dp=2,tp=4", case(heads=(8, 2), **FULL), {}),
    "a key head for four devices": ("tp=8", case(heads=(8, 2), **FULL), {}),
    "groups that do not divide": ("tp=4", case(heads=(12, 3), **FULL), {}),
    "queries cut": ("sp=4,fsdp=2", case(Mask(window=5), **FULL), {}),
    "all cut": ("fsdp=2,tp=2,sp=2", case(softcap=2.0, **FULL), {}),
    "one row of odd length": ("fsdp=8", case(batch=1, length=7, extras=("row_bias",)), {}),
    "one query of a cache": (
        "fsdp=2,tp=2,sp=2",
        case(length=1, keys=9, keep=["001111111", "111111100"], extras=("bias", "sinks")),
        {},
    ),
    "layouts given": (
        "fsdp=2,tp=2,sp=2",
        case(**FULL),
        {
            "specs": Specs(
                query=P("fsdp", None, "tp"),
                key=P(None, "sp"),
                bias=P(None, None, "sp"),
                attention=P(("fsdp", "sp")),
            )
        },
    ),
    "not sharded": ("fsdp=2,tp=4", case(heads=(8, 4), **FULL), {"sharded": False}),
}
BLOCKWISE = ["fewer key heads than tp", "queries cut", "one query of a cache"]


@pytest.mark.parametrize(
    ("mechanism", "name"),
    [("sharded_vanilla", name) for name in CASES] + [("blockwise", name) for name in BLOCKWISE],
)
def test_result_and_gradients_equal_float64(mechanism, name):
    mesh, it, settings = CASES[name]
    *arrays, out_grad = it.arrays

    @jax.jit
    def run(arrays, extras):
        call = on(mesh, it.call, **settings)
        attend = lambda arrays, extras: MECHANISMS[mechanism].attend(
            *arrays, call, it.scene, extras
        )
        out, pull = jax.vjp(attend, arrays, extras)
        (dq, dk, dv), dextras = pull(out_grad)
        return {"out": out, "q": dq, "k": dk, "v": dv} | {
            field.name: getattr(dextras, field.name) for field in dataclasses.fields(dextras)
        }

    got = jax.block_until_ready(run(arrays, it.extras))
    want = reference.gradients(*arrays, it.call, it.scene, out_grad, it.extras)
    want["out"] = reference.attention(*arrays, it.call, it.scene, it.extras)
    for part, truth in want.items():
        np.testing.assert_allclose(got[part], truth, atol=1e-5, err_msg=part)


def test_given_layouts_leave_out_what_the_mesh_lacks_or_does_not_divide():
    specs = Specs(query=P("fsdp", "sp", "tp"), generation_query=P(("dp", "fsdp"), None, "xx"))
    call = on("fsdp=2,tp=4", case(heads=(6, 2), length=4).call, specs=specs)
    assert query_spec(call, (2, 4, 6, 8)) == P("fsdp", None, None, None)
    one = dataclasses.replace(call, queries=1)
    assert query_spec(one, (2, 1, 6, 8)) == P(("dp", "fsdp"), None, None, None)


def test_on_one_device_the_reference_and_the_sharded_one_are_the_same():
    it = case()
    *arrays, _ = map(jnp.asarray, it.arrays)
    one, other = (
        MECHANISMS[name].attend(*arrays, it.call, it.scene, NOTHING)
        for name in ("vanilla", "sharded_vanilla")
    )
    np.testing.assert_array_equal(one, other)
