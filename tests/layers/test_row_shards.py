"""Scores' weights on a mesh: what is sent, and that nothing else changes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.layers.cross_entropy import Scoring, linear_cross_entropy
from flaxen.layers.row_shards import row_shards
from flaxen.layers.token_logps import token_logps
from flaxen.plan.collectives import collectives
from flaxen.quantize import RoundedWeight, Rounding
from flaxen.shard import placement_on
from flaxen.tune import LowRank

V, D = 96, 16
MESHES = [{"fsdp": 8}, {"tp": 2, "fsdp": 4}, {"sp": 2, "fsdp": 4}, {"dp": 8}]
named = pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda m: ",".join(f"{k}{n}" for k, n in m.items())
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cross_entropy(x, head, labels, placement, **how):
    return linear_cross_entropy(
        x, head[0], labels, bias=head[1], chunk=4, placement=placement, **how
    )[0]


def squared_logps(x, head, labels, placement, **how):
    logps, entropy = token_logps(
        x,
        head[0],
        labels,
        bias=head[1],
        chunk=4,
        placement=placement,
        entropy=True,
        scoring=Scoring(**how),
    )
    return jnp.sum(logps**2 + entropy)


LOSSES = pytest.mark.parametrize("loss", [cross_entropy, squared_logps])


@functools.cache
def sent(loss, mesh: tuple, tokens: int, frozen: bool = False):
    """What a program sends for the loss and its gradients, of 8 rows."""
    placement = placement_on(dict(mesh))
    where = placement.weight_spec({"vocab": V, "embed": D})

    def shape(spec, *dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(placement.mesh, spec))

    def gradients(x, head, labels):
        if frozen:
            return jax.grad(loss)(x, head, labels, placement)
        dx, (dw, db) = jax.grad(loss, (0, 1))(x, head, labels, placement)
        return dx, jax.lax.with_sharding_constraint(dw, NamedSharding(placement.mesh, where)), db

    rows = placement.activation_spec((8, tokens), ("batch", "seq"))
    head = shape(where, V, D), shape(P(where[0] if where else None), V)
    labels = shape(rows, 8, tokens, dtype=jnp.int32)
    built = jax.jit(gradients).lower(shape(rows, 8, tokens, D), head, labels).compile()
    return collectives(built.as_text(), dict(placement.mesh.shape))


@LOSSES
@named
def test_a_head_is_gathered_and_its_gradient_summed_once(loss, mesh):
    """However many chunks there are: over the devices that do not cut the vocabulary."""
    ways, tp = 8 // mesh.get("tp", 1), mesh.get("tp", 1)
    once = V // tp * (D + 1) * 4 * (ways - 1) / ways
    few, many = (
        [c for c in sent(loss, tuple(mesh.items()), tokens) if set(c.axes) - {"tp"}]
        for tokens in (8, 32)
    )
    assert few == many
    gathered = sum(c.nbytes for c in few if c.kind == "all-gather")
    summed = sum(c.nbytes for c in few if c.kind != "all-gather")
    assert gathered <= once
    assert gathered > 0 or "fsdp" not in mesh
    # A sum of which each keeps its part is half of one that all keep.
    assert once / 2 < summed <= (2 * once if "fsdp" not in mesh else 1.5 * once) + 16


@LOSSES
@named
def test_a_frozen_head_has_no_gradient_to_sum(loss, mesh):
    found = sent(loss, tuple(mesh.items()), 8, frozen=True)
    sums = [c for c in found if c.kind != "all-gather" and set(c.axes) - {"tp"}]
    assert sum(c.nbytes for c in sums) < V * 4


@LOSSES
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"sp": 2, "fsdp": 4}])
def test_no_row_leaves_its_device(loss, mesh):
    few, many = (sum(c.nbytes for c in sent(loss, tuple(mesh.items()), n)) for n in (8, 32))
    assert few == many


@LOSSES
@named
@pytest.mark.parametrize(
    ("rows", "tokens", "how"),
    [(8, 10, {}), (3, 7, {"softcap": 2.0, "scale": 0.5, "vocab": V - 5})],
)
def test_values_and_gradients_are_those_of_one_device(loss, mesh, rows, tokens, how):
    """Also where neither the batch nor the sequence divides."""
    x, labels = draw(rows, tokens, D), np.random.default_rng(1).integers(0, V - 5, (rows, tokens))
    labels[labels % 5 == 0] = -100
    head = draw(V, D, seed=2), draw(V, seed=3)
    same(loss, mesh, x, head, labels, **how)


def same(loss, mesh, x, head, labels, **how):
    def run(placement):
        function = jax.value_and_grad(loss, (0, 1), allow_int=True)
        return jax.jit(lambda x, head, labels: function(x, head, labels, placement, **how))(
            x, head, labels
        )

    got, want = (jax.tree.leaves(run(p)) for p in (placement_on(mesh), None))
    for mine, truth in zip(got, want, strict=True):
        if truth.dtype != jax.dtypes.float0:
            assert mine.dtype == truth.dtype
            scale = float(jnp.max(jnp.abs(truth)))
            np.testing.assert_allclose(mine, truth, rtol=1e-6, atol=1e-6 * scale)


@LOSSES
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"tp": 2, "fsdp": 4}])
@pytest.mark.parametrize("kind", ["adapter", "packed"])
def test_a_head_of_a_leaf_type(loss, mesh, kind):
    weight, rng = jnp.asarray(draw(V, 2 * D, seed=2)), np.random.default_rng(1)
    if kind == "adapter":
        a, b = jnp.asarray(draw(4, 2 * D, seed=4)), jnp.asarray(draw(V, 4, seed=5))
        leaf = LowRank(weight=weight, a=a, b=b, scale=0.5)
    else:
        codes = jnp.asarray(rng.integers(-128, 128, (V, 2 * D)), jnp.int8)
        parts = {"codes": codes, "scales": jnp.full((V, 1), 0.02, jnp.float16)}
        rounding = Rounding(8).fitted(V, 2 * D)
        leaf = RoundedWeight(
            parts=parts, scheme=rounding, inner=(V, 2 * D), outs=1, dtype=jnp.float32, pieces=1
        )
    labels = rng.integers(0, V, (8, 6))
    same(loss, mesh, draw(8, 6, 2 * D), (leaf, None), labels)


@pytest.mark.parametrize("shape", [(8, 4), (8, 6), (3, 5), (16,), (1, 1)])
@named
def test_rows_come_back_in_their_order(mesh, shape):
    x = draw(*shape, 3)
    cut = row_shards(placement_on(mesh), shape)
    np.testing.assert_array_equal(cut.join(cut.split(x)), x)
    np.testing.assert_array_equal(cut.whole(cut.pieces(x, 2)), x)


def test_a_mesh_that_cuts_no_rows_changes_nothing():
    assert row_shards(placement_on({"tp": 8}), (8, 4)).mesh is None
