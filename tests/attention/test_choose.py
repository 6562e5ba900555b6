"""Choosing among mechanisms, and saying why."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES

from flaxen.attention import (
    MECHANISMS,
    NOTHING,
    AttentionSettings,
    Mask,
    Mechanism,
    choose,
    explain,
    register,
    runnable,
)
from flaxen.core.errors import ConfigError
from flaxen.running import runtime_of

CALL = CASES["causal"].call
GPU = dataclasses.replace(CALL, platform="gpu", dtype="bfloat16", head_dim=64, v_head_dim=64)


def asking(mechanism, call=CALL, own=()):
    return dataclasses.replace(call, settings=AttentionSettings(mechanism, own=own))


def mine(name, prefer=0):
    zeros = lambda q, k, v, call, scene, extras=NOTHING, /: jnp.zeros_like(q)
    return Mechanism(name, zeros, refuse=lambda call: None, prefer=lambda call: prefer)


@pytest.mark.parametrize(
    ("mechanism", "call", "reason"),
    [
        ("sdpa", dataclasses.replace(CALL, softcap=3.0), "softcap"),
        ("sdpa", dataclasses.replace(CALL, sinks=True), "sinks"),
        ("sdpa", dataclasses.replace(CALL, dropout=0.1), "dropout"),
        ("sdpa", dataclasses.replace(CALL, v_head_dim=4), "4 channels and keys 8"),
        ("sdpa", dataclasses.replace(CALL, dtype="float16"), "float16"),
        ("cudnn", CALL, "GPUs, and this is cpu"),
        ("cudnn", dataclasses.replace(GPU, dtype="float32"), "float32"),
        ("cudnn", dataclasses.replace(GPU, head_dim=60), "head_dim is 60"),
        ("cudnn", dataclasses.replace(GPU, padded=True), "even, not 11"),
        ("cudnn", dataclasses.replace(GPU, softcap=3.0), "softcap"),
    ],
)
def test_a_refusal_names_the_reason(mechanism, call, reason):
    with pytest.raises(ConfigError, match=reason):
        choose(asking(mechanism, call))
    assert reason in dict(explain(call))[mechanism]


def test_each_platform_has_its_favourite():
    chosen = lambda **changes: choose(dataclasses.replace(CALL, **changes)).name
    assert chosen() == "blockwise"
    assert choose(GPU).name == "cudnn"


def test_an_unknown_mechanism_offers_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'vanilla'"):
        choose(asking("vanila"))


@pytest.mark.parametrize(
    ("name", "reason"), [("cudnn", "GPUs, and this is cpu"), ("tokamax", "pip install tokamax")]
)
def test_what_cannot_run_here_is_refused_before_there_is_a_call(name, reason):
    with pytest.raises(ConfigError, match=f"'{name}' cannot run here: .*{reason}"):
        runnable(AttentionSettings(name), "cpu")
    with pytest.raises(ConfigError, match="cannot run here"):
        runtime_of(attention=name)
    runnable(AttentionSettings("cudnn"), "gpu")
    runnable(AttentionSettings("auto"), "cpu")


def test_a_mechanism_of_one_model_is_no_other_models():
    own = mine("zeros", prefer=9)
    assert choose(asking("auto", own=(own,))) is own
    assert explain(asking("zeros", own=(own,)))[0] == ("zeros", "chosen, as asked")
    with pytest.raises(ConfigError, match="zeros"):
        choose(asking("zeros"))


def test_a_registered_mechanism_is_everybodys(monkeypatch):
    monkeypatch.setattr(MECHANISMS, "_entries", dict(MECHANISMS))
    register(mine("everywhere"))
    assert choose(asking("everywhere")).name == "everywhere"
    with pytest.raises(ConfigError, match="already"):
        register(mine("everywhere"))


@pytest.mark.parametrize("name", ["causal", "ALiBi", "bidirectional"])
def test_cudnn_gets_arguments_that_mean_the_call(name, monkeypatch):
    """Its kernel is not here; what it is told is, and another implementation takes that too."""
    real, told = jax.nn.dot_product_attention, []

    def instead(*args, implementation, **named):
        told.append((implementation, named))
        return real(*args, implementation="xla", **named)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    it = CASES[name]
    q, k, v, _ = map(jnp.asarray, it.arrays)
    for mask in (it.call.mask, dataclasses.replace(it.call.mask, window=3)):
        call = dataclasses.replace(it.call, mask=mask)
        got, want = (
            jax.jit(MECHANISMS[way].attend, static_argnums=3)(q, k, v, call, it.scene, it.extras)
            for way in ("cudnn", "vanilla")
        )
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert all(implementation == "cudnn" for implementation, _ in told)
    assert ("is_causal" in told[0][1]) == (name == "causal")
    assert ("local_window_size" in told[1][1]) == (name == "causal")
    assert Mask(window=3) != it.call.mask
