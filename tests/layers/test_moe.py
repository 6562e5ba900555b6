"""Mixtures of experts against float64 NumPy, in which every token meets its experts one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flaxen.core.errors import ConfigError
from flaxen.core.platform import compiling_for
from flaxen.layers.grouped import grouped_dot, in_tiles
from flaxen.layers.moe import ClippedExperts, Experts, Projections, WeighedInputExperts
from flaxen.layers.routers import NormalisedRouter, Router
from flaxen.layers.runtime import PLAIN, Runtime
from flaxen.quantize import Rounding, rounded
from flaxen.shard import Placement, Plan, make_mesh

E, K, D, F = 8, 2, 6, 10


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(x: np.ndarray, weight: np.ndarray, sizes: list[int]) -> np.ndarray:
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("ri,roi->ro", x[: len(group)].astype(float), weight[group].astype(float))


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [9, 0, 0, 0], [0, 2, 0, 3]])
def test_rows_meet_the_matrix_of_their_group(sizes):
    x, weight = draw(9, 4), draw(4, 5, 4, seed=1)
    want = by_hand(x, weight, sizes)
    got = grouped_dot(x, weight, jnp.array(sizes))
    np.testing.assert_allclose(got[: len(want)], want, atol=1e-5)


SHAPES = [(256, "float32", True), (128, "bfloat16", True), (96, "float32", False)]
KERNEL = [[130, 0, 40, 70], [0, 0, 290, 0], [0, 120, 0, 3], [290, 0, 0, 0]]


@pytest.mark.parametrize("sizes", KERNEL)
def test_the_kernel_of_tpus_gives_the_same_and_so_do_its_gradients(sizes):
    """Rows past the last group's have numbers, and gradients, that are none."""
    x, weight, pull = draw(290, 128), draw(4, 256, 128, seed=1), draw(290, 256, seed=2)
    used, group = sum(sizes), np.repeat(np.arange(4), sizes)

    def loss(x, weight):
        y = in_tiles(x, weight, jnp.array(sizes), interpret=True)
        return jnp.where(jnp.arange(290)[:, None] < used, y * pull, 0).sum(), y

    (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, jnp.asarray(weight))
    np.testing.assert_allclose(y[:used], by_hand(x, weight, sizes), atol=1e-3)
    want = np.einsum("ro,roi->ri", pull[:used].astype(float), weight[group].astype(float))
    np.testing.assert_allclose(dx[:used], want, atol=1e-3)
    assert not dx[used:].any()
    for g in range(4):
        want = pull[:used][group == g].T.astype(float) @ x[:used][group == g]
        np.testing.assert_allclose(dw[g], want, atol=1e-3)


@pytest.mark.parametrize(("inputs", "dtype", "kernel"), SHAPES)
def test_tpus_get_their_kernel_where_matrices_can_be_cut_into_tiles(inputs, dtype, kernel):
    x = jax.ShapeDtypeStruct((300, inputs), dtype)
    weight, sizes = jax.ShapeDtypeStruct((4, 128, inputs), dtype), jax.ShapeDtypeStruct((4,), "i4")
    with compiling_for("tpu"):
        text = jax.export.export(jax.jit(grouped_dot), platforms=["tpu"])(x, weight, sizes)
    assert ("tpu_custom_call" in text.mlir_module()) == kernel


def test_experts_of_more_tokens_than_a_block():
    """With few experts and many tokens, blocks of 128 rows are not enough for one."""
    rng, e = np.random.default_rng(4), experts()
    x, weights = draw(1, 700, D), rng.random((1, 700, K)).astype(np.float32)
    chosen = np.where(rng.random((1, 700, K)) < 0.9, [5, 0], [1, 7])
    got = jax.jit(lambda *args: e(*args, PLAIN))(x, weights, chosen)
    np.testing.assert_allclose(got, mixed_by_hand(e, x, weights, chosen), atol=1e-4)


def test_experts_elsewhere_give_the_same():
    """In one piece, as accelerators compute them."""
    args = tuple(map(jnp.asarray, tokens()))
    with compiling_for("gpu"):
        got = experts()(*args, PLAIN)
    np.testing.assert_allclose(got, mixed_by_hand(experts(), *tokens()), atol=1e-4)


def test_sixteen_bit_weights_add_up_in_float32():
    x, weight = np.ones((1, 512), np.float32), np.full((1, 1, 512), 1 / 512, np.float32)
    weight[0, 0, 0] = 4.0
    got = grouped_dot(*(jnp.asarray(a, jnp.bfloat16) for a in (x, weight)), jnp.array([1]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[4 + 511 / 512]], rtol=1e-6)


def experts() -> Experts:
    stack = lambda seed, *shape: Projections(weight=draw(E, *shape, seed=seed))
    return Experts(
        gate_proj=stack(1, F, D), up_proj=stack(2, F, D), down_proj=stack(3, D, F), act="silu"
    )


def mixed_by_hand(e: Experts, x: np.ndarray, weights: np.ndarray, chosen: np.ndarray):
    gate, up, down = (np.asarray(p.weight, float) for p in (e.gate_proj, e.up_proj, e.down_proj))
    y = np.zeros(x.shape)
    for place in np.ndindex(chosen.shape):
        token, expert = x[place[:2]].astype(float), chosen[place]
        g = gate[expert] @ token
        inner = g / (1 + np.exp(-g)) * (up[expert] @ token)
        y[place[:2]] += weights[place] * (down[expert] @ inner)
    return y


def tokens(batch: int = 8, length: int = 4) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(4)
    # Experts 2 and 3 get nothing, expert 5 nearly everything.
    chosen = np.where(rng.random((batch, length, K)) < 0.8, [5, 0], [1, 7])
    return draw(batch, length, D), rng.random(chosen.shape).astype(np.float32), chosen


def test_each_token_goes_through_its_experts():
    args = tokens()
    got = experts()(*map(jnp.asarray, args), PLAIN)
    np.testing.assert_allclose(got, mixed_by_hand(experts(), *args), atol=1e-4)


PLANS = {
    "ep=8": "auto",
    "ep=4,tp=2": "auto",
    "ep=2,tp=2,fsdp=2": "auto",
    "dp=4,ep=2": "auto",
    "sp=2,ep=4": "auto",
    # Tokens and experts cut along the same mesh axis.
    "fsdp=8": Plan({"experts": "fsdp"}, {"batch": "fsdp"}),
    # An axis of embed and of mlp, and experts along two.
    "fsdp=2,ep=2,tp=2": Plan({"experts": ("ep", "fsdp"), "embed": "tp", "mlp": "tp"}, {}),
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.exhaustive] if mesh in ("ep=8", "dp=4,ep=2") else [])
        for mesh in PLANS
    ],
)
def test_on_a_mesh_experts_give_the_same_and_so_do_their_gradients(mesh):
    from flaxen.shard import plan_named

    runtime = Runtime(placement=Placement(make_mesh(mesh), plan_named(PLANS[mesh])))
    args = tuple(map(jnp.asarray, tokens()))

    def run(runtime):
        def loss(e, x, weights):
            y = e(x, weights, args[2], runtime)
            return (y**3).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(experts(), *args[:2])

    (_, want), want_grads = run(PLAIN)
    (_, got), grads = run(runtime)
    np.testing.assert_allclose(got, want, atol=1e-4)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-3 * np.abs(w).max())


@pytest.mark.parametrize("kind", [Router, NormalisedRouter])
def test_a_router_takes_the_largest_probabilities(kind):
    x, weight = draw(2, 3, D), draw(E, D, seed=1)
    weights, chosen = kind(weight=weight, k=K)(jnp.asarray(x))
    scores = np.exp(x.astype(float) @ weight.T.astype(float))
    scores /= scores.sum(-1, keepdims=True)
    want = -np.sort(-scores)[..., :K]
    if kind is NormalisedRouter:
        want /= want.sum(-1, keepdims=True)
    np.testing.assert_array_equal(chosen, np.argsort(-scores)[..., :K])
    np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_a_router_scores_in_float32_whatever_the_model():
    """Two experts whose scores differ by less than bfloat16 can tell."""
    x = jnp.ones((1, 1, 2), jnp.bfloat16)
    weight = jnp.asarray([[256, 0.5], [256, 0.75]], jnp.bfloat16)
    weights, chosen = Router(weight=weight, k=1)(x)
    assert weights.dtype == jnp.float32
    assert chosen.item() == 1


def biased() -> ClippedExperts:
    stack = lambda seed, *shape: Projections(
        weight=draw(E, *shape, seed=seed), bias=draw(E, shape[0], seed=seed + 10)
    )
    return ClippedExperts(
        gate_proj=stack(1, F, D),
        up_proj=stack(2, F, D),
        down_proj=stack(3, D, F),
        act="silu",
        alpha=1.5,
        limit=0.7,
    )


def biased_by_hand(e: Experts, x: np.ndarray, weights: np.ndarray, chosen: np.ndarray):
    y = np.zeros(x.shape)
    for place in np.ndindex(chosen.shape):
        token, expert = x[place[:2]].astype(float), chosen[place]
        through = lambda p, v: np.asarray(p.weight, float)[expert] @ v + p.bias[expert]  # noqa: B023
        g, u = through(e.gate_proj, token).clip(max=0.7), through(e.up_proj, token).clip(-0.7, 0.7)
        y[place[:2]] += weights[place] * through(e.down_proj, g / (1 + np.exp(-1.5 * g)) * (u + 1))
    return y


@pytest.mark.parametrize("mesh", [None, "ep=4,tp=2", "ep=2,tp=2,fsdp=2", "tp=2,fsdp=4"])
def test_experts_with_biases_add_each_once(mesh):
    """Each part of the inner width gives a part of the result: the last bias is in one of them."""
    from flaxen.shard import plan_named

    placement = None if mesh is None else Placement(make_mesh(mesh), plan_named("auto"))
    args = tokens()

    def loss(e):
        y = e(*map(jnp.asarray, args), Runtime(placement=placement))
        return (y * draw(*y.shape, seed=9)).sum(), y

    (_, got), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(biased())
    np.testing.assert_allclose(got, biased_by_hand(biased(), *args), atol=1e-4)
    _, weights, chosen = args
    want = np.zeros((E, D))
    for place in np.ndindex(chosen.shape):
        want[chosen[place]] += weights[place] * draw(8, 4, D, seed=9)[place[:2]]
    np.testing.assert_allclose(grads.down_proj.bias, want, atol=1e-4)


def test_a_weight_on_what_experts_are_given_is_not_put_on_their_results():
    e, (x, weights, chosen) = experts(), tokens()
    given = WeighedInputExperts(**vars(e))
    got = given(*map(jnp.asarray, (x, weights, chosen)), PLAIN)
    want = np.zeros(x.shape)
    for i in range(K):
        one = np.ones_like(weights[..., :1])
        want += mixed_by_hand(e, x * weights[..., i : i + 1], one, chosen[..., i : i + 1])
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.exhaustive
def test_experts_whose_groups_lie_on_two_devices_are_refused():
    """Ten inner channels in five groups of two, on two devices; one group for all is no trouble."""
    from flaxen.shard import plan_named

    runtime = Runtime(placement=Placement(make_mesh("tp=2"), plan_named("auto")))
    args = tuple(map(jnp.asarray, tokens()))
    with pytest.raises(ConfigError, match=r"parts of shape .*, and 5 does not divide by tp=2"):
        rounded(experts(), {"down_proj": Rounding(8, 2)})(*args, runtime)
    whole = rounded(experts(), 8)
    there = jax.device_put(whole, NamedSharding(make_mesh("tp=2"), PartitionSpec()))
    np.testing.assert_allclose(there(*args, runtime), whole(*args, PLAIN), atol=1e-4)
