"""Mamba against its recurrence, token by token in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import recurrences as plain

from flaxen.layers.mamba import mamba, selective_scan
from flaxen.layers.norm import rms_norm

F, S = 3, 4
A = -np.exp(np.random.default_rng(4).normal(size=(F, S)))


def draws(length: int):
    draw = np.random.default_rng(length).normal
    x, dt = draw(size=(2, length, F)), plain.softplus(draw(size=(2, length, F)))
    return draw(size=(2, F, S)), (x, dt, draw(size=(2, length, S)), draw(size=(2, length, S)))


def step(h, x, dt, b, c):
    h = np.exp(1.0) ** (dt[:, None] * A) * h + (dt * x)[:, None] * b
    return h, h @ c


def fast(state, x, dt, b, c, documents):
    starts = None if documents is None else jnp.diff(documents, axis=1, prepend=0) != 0
    return selective_scan(x, dt, jnp.asarray(A, x.dtype), b, c, state, starts)


@pytest.mark.parametrize("length", plain.LENGTHS)
def test_scan(length):
    plain.check_values(fast, step, *draws(length))


def test_documents_are_apart():
    plain.check_documents(fast, step, *draws(129))


def test_gradients():
    plain.check_gradients(fast, step, *draws(65))


def layer(w: plain.Weights, x: np.ndarray) -> np.ndarray:
    z, h = (x @ w[name].T + w[f"{name}.bias"] for name in ("in_z", "in_x"))
    h = plain.silu(plain.convolved(h, w["conv1d"], w["conv1d.bias"]))
    dt = plain.unit(h @ w["x_dt"].T, 1e-3) * w["dt_norm"]
    dt = plain.softplus(dt @ w["dt_proj"].T + w["dt_proj.bias"])
    b, c = h @ w["x_b"].T, h @ w["x_c"].T
    state, out = np.zeros(w["A_log"].shape), []
    for t in range(len(x)):
        state = np.exp(-np.exp(w["A_log"]) * dt[t, :, None]) * state
        state += (dt[t] * h[t])[:, None] * b[t]
        out.append(state @ c[t] + h[t] * w["D"])
    return (np.array(out) * plain.silu(z)) @ w["out_proj"].T + w["out_proj.bias"]


def test_layer():
    sizes = {"embed": 6, "mlp": 10, "state": 4, "rank": 3, "kernel": 4}
    part = mamba(**sizes, act="silu", bias=True, dt_norm=rms_norm(1e-3, rank=3))
    plain.check_layer(plain.filled(part), layer, 6)
