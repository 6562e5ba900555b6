"""Recurrent layers against loops that are written plainly, token by token, in float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.cache import Order, described, empty
from flaxen.core.tree import is_param, paths, rebuild
from flaxen.layers.context import Context

LENGTHS = [1, 63, 64, 65, 129]
"""Around the size of a piece."""

Weights = dict[str, np.ndarray]


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def unit(x: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def convolved(x: np.ndarray, weight: np.ndarray, bias: Any = 0) -> np.ndarray:
    """x (T, channels...) through filters (channels..., kernel)."""
    taps = weight.shape[-1]
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for back in range(min(taps, t + 1)):
            out[t] += x[t - back] * weight[..., taps - 1 - back]
    return out + bias


def in_a_loop(step: Callable[..., Any], state: Any, xs: tuple[Any, ...]) -> Any:
    """`step(state, *x_t) -> state, y_t` over rows and tokens: y (B, T, ...) and the states."""
    outs, states = [], []
    for row in range(len(xs[0])):
        now, ys = state[row], []
        for t in range(xs[0].shape[1]):
            now, y = step(now, *(x[row, t] for x in xs))
            ys.append(y)
        outs.append(ys)
        states.append(now)
    return np.array(outs), np.array(states)


def check_values(fast: Any, step: Any, state: np.ndarray, xs: tuple[np.ndarray, ...]) -> None:
    """In one run, and where it is long, in two with the state handed on; `fast(state, *xs,
    documents)`.
    """
    want, last = in_a_loop(step, state, xs)
    run = jax.jit(lambda state, *xs: fast(state, *xs, None))
    single = [np.float32(x) for x in xs]
    y, end = run(np.float32(state), *single)
    np.testing.assert_allclose(y, want, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(end, last, atol=1e-4, rtol=1e-4)
    cut = 43
    if xs[0].shape[1] > 2 * cut:
        first, middle = run(np.float32(state), *(x[:, :cut] for x in single))
        second, end = run(middle, *(x[:, cut:] for x in single))
        np.testing.assert_allclose(np.concatenate([first, second], 1), want, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(end, last, atol=1e-4, rtol=1e-4)


def check_documents(fast: Any, step: Any, state: np.ndarray, xs: tuple[np.ndarray, ...]) -> None:
    """Each document of a row is as it would be alone."""
    T, nothing = xs[0].shape[1], np.zeros_like(state)
    cuts = [0, 5, 6, 70, T]
    number = np.repeat(np.arange(4), np.diff(cuts))
    documents = np.broadcast_to(number, xs[0].shape[:2])
    y, _ = jax.jit(fast)(np.float32(nothing), *(np.float32(x) for x in xs), documents)
    for start, stop in itertools.pairwise(cuts):
        want, _ = in_a_loop(step, nothing, tuple(x[:, start:stop] for x in xs))
        np.testing.assert_allclose(y[:, start:stop], want, atol=1e-4, rtol=1e-4)


def check_gradients(fast: Any, step: Any, state: np.ndarray, xs: tuple[np.ndarray, ...]) -> None:
    """Those of a scan over single tokens, in float64."""
    row = lambda state, *xs: jax.lax.scan(lambda now, x: step(now, *x), state, xs)[::-1]

    def gradients(run: Any) -> Any:
        y, last = jax.eval_shape(run, state, *xs)
        draw = np.random.default_rng(9).normal
        w, v = draw(size=y.shape), draw(size=last.shape)
        total = lambda *given: sum(jax.tree.map(lambda a, b: (a * b).sum(), run(*given), (w, v)))
        return jax.jit(jax.grad(total, argnums=tuple(range(len(xs) + 1))))(state, *xs)

    with jax.enable_x64(True):
        got = gradients(lambda state, *xs: fast(state, *xs, None))
        for one, other in zip(got, gradients(jax.vmap(row)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


def filled(part: Any, seed: int = 0) -> Any:
    """A layer with random weights."""
    rng = np.random.default_rng(seed)
    return rebuild(
        jax.tree.map(lambda p: 0, part, is_leaf=is_param),
        {
            path: jnp.asarray(rng.normal(size=p.shape) * 0.5, jnp.float32)
            for path, p in paths(part, is_param).items()
        },
    )


def weights(layer: Any) -> Weights:
    return {path.removesuffix(".weight"): np.float64(x) for path, x in paths(layer).items()}


def context(mask: Any = None, segments: Any = None, length: int = 0) -> Context:
    slots = jnp.arange(length or np.shape(segments if mask is None else mask)[1])
    scene = Scene(
        q_slots=slots,
        k_slots=slots,
        keep=None if mask is None else jnp.asarray(mask, bool),
        q_segments=segments,
        k_segments=segments,
        aligned=True,
    )
    return Context(positions=slots[None], scene=scene, rotary=())


MASK = np.ones((4, 69), bool)
MASK[1, :6] = False
MASK[2, -7:] = False
MASK[3] = np.random.default_rng(3).random(69) < 0.6


def check_layer(layer: Any, plain: Callable[[Weights, np.ndarray], np.ndarray], embed: int) -> None:
    """`plain(weights, x (T, D))` for rows that are whole, padded left, right and in between; packed
    documents; and pieces, single tokens among them, with a cache.
    """
    w = weights(layer)
    x = np.random.default_rng(1).normal(size=(*MASK.shape, embed)).astype(np.float32)
    want = [plain(w, np.float64(x[row][MASK[row]])) for row in range(4)]
    run = jax.jit(lambda layer, x, ctx: layer(x, ctx)[0])
    y = run(layer, x, context(MASK))
    for row in range(4):
        np.testing.assert_allclose(y[row][MASK[row]], want[row], atol=2e-5, rtol=1e-4)
    y = run(layer, x, context(length=69))
    np.testing.assert_allclose(y[0], want[0], atol=2e-5, rtol=1e-4)

    segments = np.repeat([[3, 9, 3]], [11, 1, 57], axis=1)
    y = run(layer, x[:1], context(segments=segments))
    alone = [plain(w, np.float64(x[0, a:b])) for a, b in ((0, 11), (11, 12), (12, 69))]
    np.testing.assert_allclose(y[0], np.concatenate(alone), atol=2e-5, rtol=1e-4)
    check_cache(layer, x, want)


@jax.jit
def _step(layer: Any, cache: Any, x: Any, valid: Any) -> Any:
    cache, at = cache.advance(valid)
    ctx = dataclasses.replace(context(valid), at=at)
    ctx = dataclasses.replace(ctx, scene=dataclasses.replace(ctx.scene, aligned=False))
    y, layers = layer(x, ctx, cache.layers[0])
    return dataclasses.replace(cache, layers=[layers]), y


def check_cache(layer: Any, x: np.ndarray, want: list[np.ndarray]) -> None:
    """What a cache held before its first token does not matter."""
    order = Order(4, 69, np.float32)
    cache = empty(described(order, [layer.cache(order)]))
    dirty = jax.tree.map(lambda x: jnp.full_like(x, np.nan), cache.layers)
    cache, pieces = dataclasses.replace(cache, layers=dirty), []
    for start, stop in ((0, 7), (7, 60), *((t, t + 1) for t in range(60, 69))):
        cache, y = _step(layer, cache, x[:, start:stop], MASK[:, start:stop])
        pieces.append(y)
    y = np.concatenate(pieces, 1)
    for row in range(4):
        np.testing.assert_allclose(y[row][MASK[row]], want[row], atol=2e-5, rtol=1e-4)
