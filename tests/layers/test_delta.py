"""The gated delta rule against its recurrence, token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import recurrences as plain

from flaxen.layers.delta import delta_rule, gated_delta_net

K, G, P, S = 2, 3, 4, 5


def draws(length: int):
    draw = np.random.default_rng(length).normal
    q, k = draw(size=(2, 2, length, K, S))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, decay = draw(size=(2, length, K, G, P)), -np.exp(draw(size=(2, length, K, G)))
    beta = plain.sigmoid(draw(size=(2, length, K, G)))
    return draw(size=(2, K, G, P, S)), (q, k, v, decay, beta)


def step(state, q, k, v, decay, beta):
    state = np.exp(1.0) ** decay[..., None, None] * state
    stood = (state * k[:, None, None]).sum(-1)
    state = state + ((v - stood) * beta[..., None])[..., None] * k[:, None, None]
    return state, (state * q[:, None, None]).sum(-1)


def fast(state, q, k, v, decay, beta, documents):
    return delta_rule(q, k, v, decay, beta, state, documents)


@pytest.mark.parametrize("length", plain.LENGTHS)
def test_rule(length):
    plain.check_values(fast, step, *draws(length))


def test_documents_are_apart():
    plain.check_documents(fast, step, *draws(129))


def test_gradients():
    plain.check_gradients(fast, step, *draws(65))


def test_one_key_over_and_over():
    """Powers of the triangular system grow beyond float32 here; solving it does not."""
    state, (q, k, v, decay, _) = draws(129)
    k = np.broadcast_to(k[:, :1], k.shape)
    beta = np.full(decay.shape, 0.999)
    plain.check_values(fast, step, state, (q, k, v, np.full(decay.shape, -1e-3), beta))


def layer(w: plain.Weights, x: np.ndarray) -> np.ndarray:
    into = lambda name: np.tensordot(x, w[f"in_{name}"], (-1, -1))
    q, k, v = (plain.silu(plain.convolved(into(n), w[f"conv_{n}"])) for n in "qkv")
    long = lambda x: np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k = q / long(q) * S**-0.5, k / long(k)
    decay = -np.exp(w["A_log"]) * plain.softplus(into("a") + w["dt_bias"])
    beta, state, out = plain.sigmoid(into("b")), np.zeros((K, G, P, S)), []
    for t in range(len(x)):
        state, y = step(state, q[t], k[t], v[t], decay[t], beta[t])
        out.append(y)
    y = plain.unit(np.array(out), 1e-3) * w["gate_norm"] * plain.silu(into("z"))
    return np.tensordot(y, w["out_proj"], ([1, 2, 3], [1, 2, 3]))


def test_layer():
    sizes = {"key_heads": K, "value_heads": K * G, "key_dim": S, "value_dim": P, "kernel": 4}
    part = gated_delta_net(embed=7, **sizes, act="silu", eps=1e-3)
    plain.check_layer(plain.filled(part), layer, 7)
