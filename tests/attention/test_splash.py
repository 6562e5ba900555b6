"""Splash attention, interpreted, against float64 NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention.flash_cases import case, compare

from flaxen.attention import AttentionSettings, Mask, splash
from flaxen.shard import make_mesh, placement_on

KEEP = np.arange(40)[None] >= np.array([[9], [0]])
DOCUMENTS = np.repeat([[0, 1, 2], [5, 5, 6]], [10, 20, 10], axis=1)
PLAIN = AttentionSettings()
CASES = {
    "129, in two blocks": case(T=129, batch=1, N=2, K=1, settings=PLAIN),
    "window, padding, documents, softcap, sinks": case(
        T=40, mask=Mask(window=12), keep=KEEP, segments=DOCUMENTS, softcap=2.0,
        sinks=[0.5, -1, 2, 0], settings=PLAIN,
    ),
    "chunks": case(T=40, N=2, K=2, mask=Mask(chunk=16), Hv=5, shift=5, settings=PLAIN),
    "other keys": case(T=7, S=45, N=2, K=1, first=0, mask=Mask(causal=False), settings=PLAIN),
    "window both ways": case(T=40, N=2, K=1, mask=Mask(causal=False, window=9), settings=PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    assert splash.static(CASES[name].call)
    compare("splash", CASES[name])


def test_a_query_to_a_cache_goes_to_our_kernel():
    c = case(T=1, S=40, first=17, nan_keys=range(18, 40))
    assert not splash.static(c.call)
    compare("splash", c, gradients=False)


@pytest.mark.parametrize("mesh", ["dp=8", "tp=4", "sp=2,tp=2,fsdp=2"])
def test_each_device_works_on_its_own_rows_heads_and_queries(mesh):
    c = case(T=40, batch=8, settings=PLAIN)
    placement = placement_on(make_mesh(mesh))
    on_mesh = dataclasses.replace(c, call=dataclasses.replace(c.call, placement=placement))
    compare("splash", on_mesh, gradients=False)


def test_blocks_are_whole_lanes_that_divide_each_other():
    sizes = splash._sizes(dataclasses.replace(PLAIN.blocks, k=96, k_major=300, q=500), 1000, 1000)
    assert sizes["block_q"] == 512
    assert (sizes["block_kv_compute"], sizes["block_kv"]) == (128, 384)
