"""Tokens that travel to the devices of their experts, against every token times every expert."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.layers.moe import ClippedExperts, Experts, Projections
from flaxen.layers.runtime import PLAIN, MLPSettings, Runtime
from flaxen.shard import Placement, make_mesh, plan_named

E, D, F = 8, 6, 10


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def experts(*, bias: bool = False) -> Experts:
    def stack(seed: int, *shape: int) -> Projections:
        added = draw(E, shape[0], seed=seed + 10) if bias else None
        return Projections(weight=draw(E, *shape, seed=seed) / 3, bias=added)

    parts = {
        "gate_proj": stack(1, F, D),
        "up_proj": stack(2, F, D),
        "down_proj": stack(3, D, F),
        "act": "silu",
    }
    return ClippedExperts(**parts, alpha=1.5, limit=0.7) if bias else Experts(**parts)


def densely(e: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """Every token through every expert, most of them weighed with nothing."""
    through = lambda p, rule, v: jnp.einsum(rule, v, p.weight) + (0 if p.bias is None else p.bias)
    gate, up = (through(p, "btd,efd->btef", x) for p in (e.gate_proj, e.up_proj))
    y = through(e.down_proj, "btef,edf->bted", e.inner(gate, up))
    share = (jax.nn.one_hot(chosen, E) * weights[..., None]).sum(-2)
    return jnp.einsum("bted,bte->btd", y, share)


def routed(kind: str, batch: int, length: int, k: int = 2) -> jax.Array:
    rng = np.random.default_rng(5)
    if kind == "one":
        return jnp.full((batch, length, 1), 3)
    if kind == "neighbours":
        return jnp.broadcast_to(jnp.arange(k), (batch, length, k))
    scores = rng.random((batch, length, E))
    return jnp.asarray(np.argsort(scores, -1)[..., :k])


def on(mesh: str | None, **settings: bool) -> Runtime:
    placement = None if mesh is None else Placement(make_mesh(mesh), plan_named("auto"))
    return Runtime(placement=placement, mlp=MLPSettings(**settings))


def compare(e: Experts, runtime: Runtime, chosen: jax.Array) -> None:
    x, weights = draw(*chosen.shape[:2], D, seed=7), jnp.abs(draw(*chosen.shape, seed=8))
    pull = draw(*x.shape, seed=9)

    def run(mix):
        def loss(e, x, weights):
            y = mix(e, x, weights)
            return (y * pull).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(e, x, weights)

    (_, got), grads = run(lambda e, x, w: e(x, w, chosen, runtime))
    (_, want), want_grads = run(lambda e, x, w: densely(e, x, w, chosen))
    np.testing.assert_allclose(got, want, atol=1e-5)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5 * max(1, np.abs(w).max()))


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        "ep=2",
        "ep=4,tp=2",
        pytest.param("ep=8", marks=pytest.mark.exhaustive),
        pytest.param("dp=2,ep=4", marks=pytest.mark.exhaustive),
        "sp=2,ep=2,fsdp=2",
    ],
)
def test_results_and_gradients_are_those_of_every_token_times_every_expert(mesh):
    compare(experts(), on(mesh), routed("random", 8, 6))


@pytest.mark.parametrize(
    ("kind", "batch", "length"),
    [
        ("one", 8, 17),
        pytest.param("neighbours", 8, 17, marks=pytest.mark.exhaustive),
        ("random", 3, 8),
        pytest.param("random", 1, 136, marks=pytest.mark.exhaustive),
    ],
)
def test_no_token_is_dropped_however_they_are_spread(kind, batch, length):
    """Parcels hold 8 tokens; 17 that all go to one device travel in three rounds."""
    compare(experts(), on("ep=8"), routed(kind, batch, length))


def test_tokens_that_cannot_be_cut_are_summed_over():
    compare(experts(), on("ep=8"), routed("random", 3, 5))
    compare(experts(bias=True), on("ep=4,tp=2"), routed("random", 1, 1))


def test_biases_are_added_once_where_tokens_travel():
    compare(experts(bias=True), on("ep=4,tp=2"), routed("random", 4, 19))


def test_as_many_experts_of_a_token_as_there_are():
    compare(experts(), on("ep=2"), routed("random", 2, 9, k=E))


def compiled(runtime: Runtime, batch: int, length: int) -> str:
    chosen = routed("random", batch, length)
    args = experts(), draw(batch, length, D), jnp.ones(chosen.shape), chosen
    return jax.jit(lambda e, *args: e(*args, runtime)).lower(*args).compile().as_text()


def summed(text: str) -> list[str]:
    return re.findall(r"= f\d+\[[\d,]+\]\S* all-reduce", text)


def test_travelling_takes_the_place_of_the_sum_over_experts():
    text = compiled(on("ep=8"), 8, 17)
    assert "all-to-all" in text
    assert not summed(text)


@pytest.mark.parametrize(("runtime", "length"), [("cut", 5), ("asked", 8)])
def test_without_travelling_there_is_the_sum(runtime, length):
    text = compiled(on("ep=8", exchange=runtime != "asked"), 3, length)
    assert "all-to-all" not in text
    assert summed(text)


def test_the_settings_do_not_change_the_numbers():
    chosen = routed("random", 8, 6)
    args = draw(8, 6, D), jnp.ones(chosen.shape), chosen
    got = [
        jax.jit(lambda r=r: experts()(*args, r))() for r in (on("ep=8"), on("ep=8", exchange=False))
    ]
    np.testing.assert_allclose(*got, atol=1e-5)
    np.testing.assert_allclose(got[0], experts()(*args, PLAIN), atol=1e-5)
