"""Lightning attention against its recurrence, token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import recurrences as plain

from flaxen.layers.lightning import lightning_attention

N, H = 3, 4


def layer(w: plain.Weights, x: np.ndarray) -> np.ndarray:
    into = lambda name: np.tensordot(x, w[name], (-1, -1))
    q, k, v = (plain.silu(into(name)) for name in "qkv")
    rates = np.exp(-np.array([2 ** (-8 * (n + 1) / N) for n in range(N)]) * (0.75 + 1e-5))
    state, out = np.zeros((N, H, H)), []
    for t in range(len(x)):
        state = rates[:, None, None] * state + k[t][:, :, None] * v[t][:, None]
        out.append(np.einsum("nh,nhp->np", q[t], state))
    y = plain.unit(np.array(out).reshape(len(x), -1), 1e-3).reshape(-1, N, H)
    y = y * w["norm_of_heads"] * plain.sigmoid(into("output_gate"))
    return np.tensordot(y, w["out_proj"], ([1, 2], [1, 2]))


@pytest.mark.parametrize("seed", [0, 1])
def test_layer(seed):
    part = lightning_attention(embed=7, heads=N, head_dim=H, act="silu", eps=1e-3, depth=0.25)
    plain.check_layer(plain.filled(part, seed), layer, 7)
