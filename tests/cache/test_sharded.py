"""A cache cut along its slots: each device writes and reads its own."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
import small_caches as caches
import tiny

from flaxen.cache import CacheSettings
from flaxen.models.causal import extend, forward_cached
from flaxen.shard import Placement, make_mesh, plan_named


@pytest.mark.parametrize("codec", [None, "int8"])
def test_one_token_moves_no_cache(codec):
    """On four devices; all that they exchange is smaller than one slot of all layers."""
    model = tiny.model("llama", "sp=4")
    settings = CacheSettings(layout="dense", codec=codec)
    runtime = dataclasses.replace(model.runtime, cache=settings)
    shapes = model.module.cache_shapes(1, 1024, runtime=runtime)
    assert shapes.layers[0].v.sharding.spec[2] == "sp" if codec is None else True
    ids, valid = np.ones((1, 1), np.int32), np.ones((1, 1), bool)
    lowered = forward_cached.lower(model.module, ids, shapes, valid, runtime=runtime)
    text = lowered.compile().as_text() or ""
    moved = [line for line in text.splitlines() if re.search(COLLECTIVE, line)]
    assert moved
    sizes = [
        np.prod([int(n) for n in shape.split(",") if n])
        for line in moved
        for shape in re.findall(r"\w+\[([\d,]*)\]", re.split(COLLECTIVE, line)[0])
    ]
    assert max(sizes) <= 64
    assert len(moved) < 20


COLLECTIVE = r" (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@pytest.mark.parametrize("layout", ["dense", "ring", "latent"])
def test_cut_caches_hold_what_whole_ones_hold(layout):
    placement = Placement(make_mesh("sp=4"), plan_named("auto"))
    valid = np.ones((2, 6), bool)
    valid[0, :2] = False
    new = caches.tokens(layout, 6)

    def run(placement):
        @jax.jit
        def append(cache, new):
            cache, at = cache.advance(jax.numpy.asarray(valid), placement)
            layer = cache.layers[0].append(*new, at)
            return dataclasses.replace(cache, layers=[layer])

        cache = caches.cache(layout, "int4", placement=placement)
        return append(append(cache, new), new)

    cut, whole = run(placement), run(None)
    assert "sp" in str(jax.tree.leaves(cut.layers)[0].sharding.spec)
    assert caches.bits(cut) == caches.bits(whole)


def test_whole_on_every_device_if_asked():
    model = tiny.model("llama", "sp=4")
    runtime = dataclasses.replace(model.runtime, cache=CacheSettings(sharded=False))
    shapes = model.module.cache_shapes(1, 64, runtime=runtime)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(shapes))


def test_a_row_without_pages_left_is_nan_and_no_other():
    model = tiny.model("llama")
    runtime = dataclasses.replace(model.runtime, cache=CacheSettings(layout="paged", page_size=2))
    cache = model.module.init_cache(2, 4, runtime=runtime)
    valid = np.array([[True] * 5, [True] * 3 + [False] * 2])
    ids = tiny.tokens(2, 5)
    x, _ = jax.jit(extend, static_argnames="runtime")(
        model.module, ids, cache, valid, runtime=runtime
    )
    assert np.isnan(x[0]).all()
    assert np.isfinite(x[1, :3]).all()
