"""Flash attention, our kernel and the choice among kernels, against float64 NumPy."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.flash_cases import SMALL, arrays, case, compare

from flaxen.attention import MECHANISMS, AttentionSettings, Blocks, Mask, flash, flash_tile
from flaxen.core.platform import compiling_for
from flaxen.shard import make_mesh, placement_on

DOCUMENTS = np.repeat([[0, 1, 2], [5, 5, 6]], [20, 30, 20], axis=1)
LEFT = np.arange(70)[None] >= np.array([[9], [0]])
RIGHT = np.arange(70)[None] < np.array([[70], [41]])
SLOPES, SINKS = [0.5, 0.25, 0.1, 0.05], [0.5, -1, 2, 0]
CASES = {
    "129 in tiles of 64": case(T=129, batch=1),
    "all at once": case(
        mask=Mask(window=30), keep=LEFT, segments=DOCUMENTS, softcap=2.0, sinks=SINKS,
        slopes=SLOPES, Hv=5,
    ),
    "chunks, 127 in blocks of 128": case(
        T=127, batch=1, K=1, mask=Mask(chunk=24), shift=5, settings=AttentionSettings()
    ),
    "window both ways": case(mask=Mask(causal=False, window=9), keep=RIGHT),
    "a window over a cache": case(
        T=5, S=40, first=17, mask=Mask(window=6), nan_keys=[*range(12), *range(22, 40)]
    ),
    "recomputed by XLA": case(
        sinks=SINKS, slopes=SLOPES, settings=dataclasses.replace(SMALL, backward="xla")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_our_kernel_equals_float64(name):
    compare("pallas_flash", CASES[name])


@pytest.mark.parametrize("mechanism", ["pallas_flash", "splash"])
def test_kernels_run_where_jax_counts_in_64_bits(mechanism):
    with jax.enable_x64(True):
        compare(mechanism, case(T=20, batch=1, N=2, K=1, mask=Mask(window=6)))


def test_kernels_that_add_up_in_float32_refuse_float64():
    call = dataclasses.replace(case().call, dtype="float64")
    for mechanism in ("pallas_flash", "splash"):
        assert "float64" in str(MECHANISMS[mechanism].refuse(call))
    assert MECHANISMS["flash"].refuse(call) is None
    assert not flash.shipped_for_gpu(call)


FORWARD = {
    "one query to a cache with unused slots": case(
        T=1, S=40, first=17, keep=[[True] * 18 + [False] * 22] * 2, nan_keys=range(18, 40)
    ),
    "one token": case(T=1, K=4),
    "prefix": case(mask=Mask(prefix=True, window=20), prefix=[33, 0]),
    "other keys": case(T=7, S=45, first=0, mask=Mask(causal=False)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_our_forward_pass_equals_float64(name):
    compare("pallas_flash", FORWARD[name], gradients=False)


def test_16_bit_floats_are_close():
    compare("pallas_flash", case(T=40), atol=2e-2, dtype=jnp.bfloat16)


@pytest.mark.parametrize("mesh", ["dp=8", "tp=4", "sp=2,tp=2,fsdp=2"])
def test_each_device_works_on_its_own_rows_heads_and_queries(mesh):
    c = case(T=40, batch=8)
    placement = placement_on(make_mesh(mesh))
    on_mesh = dataclasses.replace(c, call=dataclasses.replace(c.call, placement=placement))
    compare("pallas_flash", on_mesh, gradients=mesh.startswith("sp"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 11}, {"causal": False, "window": 5}, {"chunk": 24}, {"window": 9, "chunk": 24}],
    ids=str,
)
def test_no_block_is_skipped_that_holds_something_to_see(changes):
    T, G, bq, bk = 96, 2, 16, 8
    plan = flash_tile.Plan(Mask(**changes), 1.0, None, G, True, SMALL.blocks, "cpu")
    slots = np.arange(T) - 5  # as after five tokens of padding
    rows = np.repeat(slots, G)[:, None]
    see = flash_tile.see(
        plan.mask, flash_tile.Marks(rows, 0, rows // 24), flash_tile.Marks(slots, 0, slots // 24)
    )
    tiles: Any = np.asarray(see).reshape(T * G // bq, bq, T // bk, bk).any((1, 3))
    spare = 1 + ("chunk" in changes) * 2 * 24 // bk
    for span, table in ((flash_tile.keys_of, tiles), (flash_tile.rows_of, tiles.T)):
        for i, wanted in enumerate(table):
            low, high = (int(x) for x in span(plan, jnp.int32(i), bq, bk, len(wanted)))
            where = np.flatnonzero(wanted)
            assert low <= where.min()
            assert where.max() < high
            assert high - low <= len(where) + spare


def test_the_shipped_kernel_for_tpus_gives_the_same_numbers():
    from jax.experimental.pallas import tpu

    c = case(T=20, H=16, N=2, K=1, keep=np.arange(20)[None] >= np.array([[3], [0]]))
    assert flash.shipped_for_tpu(c.call)
    with compiling_for("tpu"), tpu.force_tpu_interpret_mode():
        compare("flash", c)


@pytest.mark.parametrize(("asked", "rows", "given"), [(1, 2, 1), (2, 2, 2), (4, 6, 2)])
def test_the_shipped_kernel_takes_as_many_rows_at_once_as_are_asked(
    asked, rows, given, monkeypatch
):
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    seen = []

    def spy(q, k, v, *, block_sizes, **rest):
        seen.append(block_sizes.block_b)
        return jnp.zeros_like(q)

    monkeypatch.setattr(kernel, "flash_attention", spy)
    c = case(T=20, H=16, N=2, K=1, batch=rows, settings=AttentionSettings(blocks=Blocks(b=asked)))
    q, k, v, _ = arrays(c)
    with compiling_for("tpu"):
        MECHANISMS["flash"].attend(q, k, v, c.call, c.scene)
    assert seen == [given]


def test_what_a_shipped_kernel_cannot_do_goes_to_ours():
    for able in (flash.shipped_for_tpu, flash.shipped_for_gpu):
        assert able(case().call)
        for odd in (
            case(softcap=2.0), case(mask=Mask(window=3)), case(sinks=SINKS), case(Hv=5),
            case(T=5, S=40, first=17),
        ):  # fmt: skip
            assert not able(odd.call)


def test_elsewhere_the_backward_pass_is_that_of_xla_and_it_is_said_once(caplog):
    flash._say_once.cache_clear()
    c = case(T=8)
    q, k, v, _ = arrays(c)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            MECHANISMS["flash"].attend(q, k, v, c.call, c.scene)
    assert len(caplog.records) == 1
    assert "xla" in caplog.text.lower()


def test_flash_elsewhere_equals_float64():
    compare("flash", CASES["all at once"])


def test_bias_is_refused_with_the_reason():
    call = dataclasses.replace(case().call, bias=True)
    assert "no bias" in (MECHANISMS["pallas_flash"].refuse(call) or "")
