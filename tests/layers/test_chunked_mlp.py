"""A feed-forward network in pieces computes what it computes at once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.core.errors import ConfigError
from flaxen.core.tree import is_param
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.moe import moe
from flaxen.layers.routers import router
from flaxen.layers.runtime import MLPSettings, Runtime
from flaxen.shard import Placement, make_mesh, plan_named

NETWORKS = {
    "gated": gated_mlp(8, 64, "silu", bias=True),
    "moe": moe(router(8, 4, 2, normalised=True), 16, "silu"),
}


def filled(abstract):
    rng = np.random.default_rng(0)
    draw = lambda p: jnp.float32(rng.standard_normal(p.shape) * 0.3)
    return jax.tree.map(draw, abstract, is_leaf=is_param)


def context(**settings):
    runtime = Runtime(mlp=MLPSettings(**settings))
    return Context(positions=jnp.zeros(0), scene=None, rotary=(), runtime=runtime)  # pyright: ignore


@functools.cache
def program(name, **settings):
    def loss(mlp, x, ctx):
        y = feed_forward(mlp, x, ctx)
        return (y**2).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def tokens(length):
    return jnp.float32(np.random.default_rng(1).standard_normal((2, length, 8)))


@pytest.mark.parametrize(
    ("name", "length"), [("gated", 8), ("gated", 10), ("gated", 5), ("moe", 7)]
)
def test_values_and_gradients_are_the_same_for_any_length(name, length):
    mlp, x = filled(NETWORKS[name]), tokens(length)
    want, got = (program(name)(mlp, x, context(scan=scan, chunk=4)) for scan in (False, True))
    for mine, truth in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, truth, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got[0][1], want[0][1], atol=1e-6)


def test_pieces_hold_at_most_so_many_tokens():
    mlp, seen = filled(NETWORKS["gated"]), []

    def spy(x, ctx):
        seen.append(x.shape)
        return mlp(x, ctx)

    feed_forward(spy, tokens(10), context(scan=True, chunk=4))
    assert seen == [(2, 4, 8)]
    feed_forward(spy, tokens(4), context(scan=True, chunk=4))
    feed_forward(spy, tokens(10), context())
    assert seen[1:] == [(2, 4, 8), (2, 10, 8)]


def test_memory_falls():
    def temp(scan):
        lowered = program("gated").lower(
            filled(NETWORKS["gated"]), tokens(512), context(scan=scan, chunk=32)
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(True) < temp(False) / 3


def test_a_sequence_that_is_cut_over_devices_gives_the_same():
    mlp, x = filled(NETWORKS["gated"]), tokens(16)
    ctx = context(scan=True, chunk=8)
    placement = Placement(make_mesh("dp=2,sp=4"), plan_named("auto"))
    where = dataclasses.replace(ctx.runtime, placement=placement)
    x = jax.device_put(x, placement.activation(x.shape, ("batch", "seq", "embed")))
    y = jax.jit(lambda x: feed_forward(mlp, x, dataclasses.replace(ctx, runtime=where)))(x)
    np.testing.assert_allclose(y, mlp(x, ctx), atol=1e-6)


def test_a_piece_has_a_token():
    with pytest.raises(ConfigError, match=r"mlp\.chunk is 0"):
        MLPSettings(chunk=0)
