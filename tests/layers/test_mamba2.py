"""Mamba 2 against its recurrence, token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import recurrences as plain

from flaxen.layers.decay import fading
from flaxen.layers.gated_norm import gate_then_norm
from flaxen.layers.mamba2 import mamba2

K, G, P, S = 2, 3, 4, 5


def draws(length: int):
    draw = np.random.default_rng(length).normal
    q, k = draw(size=(2, 2, length, K, S))
    v, decay = draw(size=(2, length, K, G, P)), -np.exp(draw(size=(2, length, K, G)))
    return draw(size=(2, K, G, P, S)), (q, k, v, decay)


def step(state, q, k, v, decay):
    state = np.exp(1.0) ** decay[..., None, None] * state + v[..., None] * k[:, None, None]
    return state, (state * q[:, None, None]).sum(-1)


def fast(state, q, k, v, decay, documents):
    return fading(q, k, v, decay, state, documents)


@pytest.mark.parametrize("length", plain.LENGTHS)
def test_fading(length):
    plain.check_values(fast, step, *draws(length))


def test_documents_are_apart():
    plain.check_documents(fast, step, *draws(129))


def test_gradients():
    plain.check_gradients(fast, step, *draws(65))


def test_a_head_that_forgets_at_once_gives_no_nan():
    state, (q, k, v, decay) = draws(129)
    decay = np.where(np.arange(3) == 1, -1e4, decay)
    plain.check_values(fast, step, state, (q, k, v, decay))
    plain.check_gradients(fast, step, state, tuple(x[:, :9] for x in (q, k, v, decay)))


N, GROUPS = 6, 2


def layer(w: plain.Weights, x: np.ndarray) -> np.ndarray:
    into = lambda name: np.tensordot(x, w[f"in_{name}"], (-1, -1)) + w[f"in_{name}.bias"]
    h, b, c = (
        plain.silu(plain.convolved(into(name), w[f"conv_{name}"], w[f"conv_{name}.bias"]))
        for name in ("x", "b", "c")
    )
    dt = np.clip(plain.softplus(into("dt") + w["dt_bias"]), 0.1, 0.9)
    state, out = np.zeros((N, P, S)), []
    for t in range(len(x)):
        for n in range(N):
            group = n // (N // GROUPS)
            state[n] *= np.exp(-np.exp(w["A_log"][n]) * dt[t, n])
            state[n] += dt[t, n] * h[t, n][:, None] * b[t, group]
        y = [state[n] @ c[t, n // (N // GROUPS)] + w["D"][n] * h[t, n] for n in range(N)]
        out.append(y)
    y = np.array(out) * plain.silu(into("z"))
    y = plain.unit(y.reshape(len(x), GROUPS, -1), 1e-3).reshape(y.shape) * w["gate_norm"]
    return np.tensordot(y, w["out_proj"], ([1, 2], [1, 2])) + w["out_proj.bias"]


def test_layer():
    part = mamba2(
        gate_then_norm(1e-3, N, P, GROUPS),
        embed=7,
        groups=GROUPS,
        state=S,
        kernel=3,
        act="silu",
        bias=True,
        limit=(0.1, 0.9),
    )
    plain.check_layer(plain.filled(part), layer, 7)
