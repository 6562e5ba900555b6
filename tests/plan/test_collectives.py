"""What programs send, against programs whose traffic is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.plan.collectives import Collective, collectives
from flaxen.shard import make_mesh

MESH = {"fsdp": 2, "tp": 4}
FLOAT = 4


def text_of(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def shape(*dims: int, spec: P) -> jax.ShapeDtypeStruct:
    where = NamedSharding(make_mesh(MESH), spec)
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=where)


def test_a_contraction_that_is_cut_is_summed_over_its_axis():
    x, w = shape(8, 32, spec=P("fsdp", "tp")), shape(32, 16, spec=P("tp", None))
    (found,) = collectives(text_of(jnp.matmul, x, w), MESH)
    sent = 2 * 3 / 4 * (8 // 2 * 16 * FLOAT)
    assert found == Collective("all-reduce", ("tp",), 4, 1, int(sent))


def test_every_turn_of_a_loop_counts():
    x, w = shape(8, 16, spec=P("fsdp", None)), shape(5, 16, 16, spec=P(None, "tp", None))

    def layers(x, w):
        cut = NamedSharding(make_mesh(MESH), P("fsdp", "tp"))
        step = lambda x, w: (jnp.tanh(jax.lax.with_sharding_constraint(x, cut) @ w), None)
        return jax.lax.scan(step, x, w)[0]

    found = [c for c in collectives(text_of(layers, x, w), MESH) if c.kind == "all-reduce"]
    sent = 5 * 2 * 3 / 4 * (8 // 2 * 16 * FLOAT)
    assert found == [Collective("all-reduce", ("tp",), 4, 5, int(sent))]


def test_a_weight_that_is_cut_to_be_stored_is_gathered():
    x, w = shape(8, 32, spec=P("fsdp", None)), shape(32, 16, spec=P("fsdp", None))
    whole = NamedSharding(make_mesh(MESH), P())
    product = lambda x, w: x @ jax.lax.with_sharding_constraint(w, whole)
    (found,) = collectives(text_of(product, x, w), MESH)
    assert found == Collective("all-gather", ("fsdp",), 2, 1, 32 * 16 * FLOAT // 2)


def line(operation: str, kind: str = "f32[4,16]{1,0}") -> str:
    return f"ENTRY %main (a: f32[4]) -> f32[4] {{\n  %x = {kind} {operation}\n}}"


@pytest.mark.parametrize(
    ("groups", "axes", "devices"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",), 2),
        ("{{0,1,2,3},{4,5,6,7}}", ("tp",), 4),
        ("[2,4]<=[8]", ("tp",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("fsdp",), 2),
        ("[1,8]<=[8]", ("fsdp", "tp"), 8),
        ("mesh['a'=2,'b'=4] {'b'}", ("tp",), 4),
        ("mesh['a'=2,'b'=4] {'a'}", ("fsdp",), 2),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("tp",), 4),
    ],
)
def test_groups_are_read_in_every_notation(groups: str, axes: tuple[str, ...], devices: int):
    program = line(f"all-reduce(%a), replica_groups={groups}, to_apply=%add")
    (found,) = collectives(program, MESH)
    assert (found.axes, found.devices) == (axes, devices)


def test_what_is_begun_and_ended_apart_counts_once():
    begun = line(
        "all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}",
        "(bf16[4,16]{1,0:T(8,128)(2,1)}, bf16[16,16]{1,0:T(8,128)(2,1)})",
    )
    ended = begun.replace("\n}", "\n  %y = bf16[16,16]{1,0} all-gather-done(%x)\n}")
    assert collectives(ended, MESH) == [
        Collective("all-gather", ("tp",), 4, 1, 16 * 16 * 2 * 3 // 4)
    ]


def test_a_ring_of_permutes_knows_its_axis():
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    program = line(f"collective-permute(%a), source_target_pairs={pairs}")
    assert collectives(program, MESH) == [
        Collective("collective-permute", ("tp",), 4, 1, 4 * 16 * FLOAT)
    ]


def test_a_sum_of_which_each_keeps_its_part_is_a_scatter():
    program = (
        "%all-reduce-scatter.1 (i: f32[8,16]) -> f32[2,16] {\n"
        "  %r = f32[8,16]{1,0} all-reduce(%i), replica_groups=[2,4]<=[8], to_apply=%add\n}\n"
        + line("fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1")
    )
    assert collectives(program, MESH) == [
        Collective("reduce-scatter", ("tp",), 4, 1, 8 * 16 * FLOAT * 3 // 4)
    ]


def test_a_loop_without_a_count_ends_where_its_condition_says():
    program = (
        "%body (p: f32[4]) -> f32[4] {\n"
        "  %r = f32[4,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add\n}\n"
        "%end (p: f32[4]) -> pred[] {\n  %c = s32[]{:T(128)} constant(7)\n}\n"
        + line("while(%a), condition=%end, body=%body")
    )
    (found,) = collectives(program, MESH)
    assert found.count == 7


def test_nothing_is_sent_on_one_device():
    x = np.ones((4, 4), np.float32)
    assert collectives(text_of(jnp.matmul, x, x), {"fsdp": 1}) == []
