"""Functions by name, and masks spelled out as Transformers does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES

from flaxen.attention import (
    MECHANISMS,
    AttentionInterface,
    AttentionMaskInterface,
    AttentionSettings,
    Mask,
    Scene,
    choose,
    from_hf_function,
)
from flaxen.layers.positions import chunk_slots

MASKS = dict(np.load(Path(__file__).parents[1] / "data" / "unit" / "masks.npz"))
KINDS = {
    "causal": Mask(),
    "sliding": Mask(window=3),
    "chunked": Mask(chunk=4),
    "bidirectional": Mask(causal=False),
}


@pytest.mark.parametrize("name", [name for name in MASKS if "/" in name])
def test_masks_are_those_of_transformers(name):
    kind, how, rows = name.split("/")
    keep = jnp.asarray(MASKS["attention_mask"], bool) if rows == "padded" else None
    documents = np.cumsum(np.diff(MASKS["position_ids"], axis=1, prepend=-1) != 1, axis=1)
    segments = jnp.asarray(documents) if rows == "packed" else None
    slots = chunk_slots(8, keep, segments)
    scene = Scene(
        q_slots=slots,
        k_slots=slots,
        keep=keep,
        q_segments=segments,
        k_segments=segments,
        aligned=True,
    )
    got, want = AttentionMaskInterface()[how](KINDS[kind], scene, jnp.float32), MASKS[name]
    if not want.size:
        assert got is None
    else:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.fixture
def interface(monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {})
    monkeypatch.setattr(AttentionInterface, "_warned", set())
    return AttentionInterface


def test_an_instance_hides_what_is_registered_and_gives_it_back(interface):
    first, second = interface(), interface()
    interface.register("a", abs)
    first["a"], first["b"] = max, min
    assert (first["a"], second["a"]) == (max, abs)
    assert (list(first), len(first), second.valid_keys()) == (["a", "b"], 2, ["a"])
    del first["a"]
    assert first["a"] is abs
    with pytest.raises(KeyError):
        del first["a"]
    with pytest.raises(KeyError):
        second["b"]
    assert "a" not in AttentionMaskInterface()


def test_a_name_is_looked_up_as_transformers_does(interface):
    interface.register("mine", max)
    functions = interface()
    assert functions.get_interface("mine", abs) is max
    assert functions.get_interface("eager", abs) is abs
    with pytest.warns(UserWarning, match="paged"):
        assert functions.get_interface("paged|mine", abs) is max
    with pytest.warns(UserWarning, match="default") as seen:
        assert functions.get_interface(None, abs) is abs
        assert functions.get_interface(None, abs) is abs
    assert len(seen) == 1
    with pytest.raises(KeyError, match="`other` is not a valid attention implementation"):
        functions.get_interface("other", abs)


def eager(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, scaling: float, **_: Any):
    k, v = (jnp.repeat(x, module.num_key_value_groups, axis=1) for x in (k, v))
    scores = q @ jnp.swapaxes(k, 2, 3) * scaling
    weights = jax.nn.softmax(scores + attention_mask, axis=-1)
    return jnp.swapaxes(weights @ v, 1, 2), weights


@pytest.mark.parametrize("name", ["window, padded right and inside", "bias of a row, padded left"])
def test_a_function_of_that_kind_is_a_mechanism_of_a_model(name):
    it, own = CASES[name], from_hf_function("mine", eager)
    q, k, v, _ = map(jnp.asarray, it.arrays)
    call = dataclasses.replace(it.call, settings=AttentionSettings("mine", own=(own,)))
    got, want = (
        jax.jit(mechanism.attend, static_argnums=3)(q, k, v, call, it.scene, it.extras)
        for mechanism in (choose(call), MECHANISMS["vanilla"])
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
