"""Every policy gives the same gradients, and the memory it promises."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.checkpointing import (
    POLICIES,
    Checkpointing,
    _warn_once,
    checkpointed,
    checkpointing_of,
)
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import mean_loss
from flaxen.models.fold import Folded, folded, stack_params, unfold
from flaxen.pretrained import from_config

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {
    "dense": COMMON | {"model_type": "llama"},
    "moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
}
IDS = np.random.default_rng(0).integers(0, 64, (2, 128), dtype=np.int32)


@functools.cache
def model(kind: str, scan: bool) -> Any:
    return from_config(CONFIGS[kind], scan_layers=scan)


@functools.cache
def trained(kind: str, scan: bool, how: Checkpointing) -> tuple[list[np.ndarray], int]:
    """Gradients of the loss, layer by layer, and the bytes that its program needs in between."""
    ours = model(kind, scan)
    ours = ours.replace(runtime=dataclasses.replace(ours.runtime, checkpointing=how))
    program = jax.jit(jax.grad(lambda module: ours.replace(module=module).loss(IDS, IDS)))
    program = program.lower(ours.module).compile()
    grads = program(ours.module)
    grads = dataclasses.replace(grads, layers=unfold(grads.layers, lambda w, i: w[i]))
    return list(map(np.asarray, jax.tree.leaves(grads))), (
        program.memory_analysis().temp_size_in_bytes
    )


def same(kind: str, scan: bool, how: Checkpointing) -> None:
    want = trained(kind, True, Checkpointing())[0]
    for mine, truth in zip(trained(kind, scan, how)[0], want, strict=True):
        np.testing.assert_allclose(mine, truth, atol=1e-6)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"nothing"}))
def test_gradients_do_not_depend_on_the_policy(policy: str):
    same("dense", True, Checkpointing(policy))


@pytest.mark.exhaustive
def test_mixtures_of_experts_behind_a_dense_layer_too():
    assert len(model("moe", True).module.layers.head) == 1
    same("moe", True, Checkpointing("dots"))


def test_layers_in_a_list_too():
    assert not isinstance(model("dense", False).module.layers, Folded)
    same("dense", False, Checkpointing("dots_with_no_batch_dims", 2))


def test_every_nth_layer_inside_the_scan_too():
    same("dense", True, Checkpointing("block", 3))


def test_memory_falls_in_the_promised_order():
    order = ["block", "dots_with_no_batch_dims", "dots", "everything"]
    temps = [trained("dense", True, Checkpointing(policy))[1] for policy in order]
    assert temps == sorted(temps)
    assert temps[0] < temps[1] < temps[2] < temps[3]
    assert temps[0] < trained("dense", True, Checkpointing("block", 3))[1] < temps[3]


def recomputed(kind: str, how: Checkpointing) -> list[bool]:
    """Which layers are, by the calls that one trace of the model makes to `jax.checkpoint`."""
    module = folded(abstract_module(hf_config(CONFIGS[kind]))[0], stack_params)
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, np.float32), module, is_leaf=is_param
    )
    run = lambda module: mean_loss(module, IDS, IDS, runtime=Runtime(checkpointing=how))
    return _layers(jax.make_jaxpr(run)(shapes).jaxpr, False)


def _layers(jaxpr: Any, inside: bool) -> list[bool]:
    """True or False for each softmax over keys, in order; those of a scan once for each turn."""
    found: list[bool] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        scores = [v.aval.shape[-1:] == (128,) for v in eqn.outvars]
        if name == "exp" and all(scores) and eqn.outvars[0].aval.ndim > 3:
            found.append(inside)
        for inner in jaxprs_in_params(eqn.params):
            times = eqn.params["length"] if name == "scan" else 1
            found += _layers(inner, inside or name in ("checkpoint", "remat2")) * times
    return found


def test_the_nth_layer_is_counted_from_the_first_of_the_model():
    """The mixture's scan begins with layer 1, so the dense layer before it counts."""
    assert recomputed("moe", Checkpointing("block", 2)) == [True, False, True, False]
    assert recomputed("dense", Checkpointing("block", 3)) == [True, False, False, True]
    assert recomputed("dense", Checkpointing()) == [False] * 4


def test_unknown_policies_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'dots'"):
        Checkpointing("dotz")


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_every_is_a_whole_number(every: Any):
    with pytest.raises(ConfigError, match="expected a whole number"):
        Checkpointing("block", every)


def test_offloading_needs_memory_of_the_host(monkeypatch: pytest.MonkeyPatch):
    class Memory:
        kind = "device"

    class Device:
        platform = "toy"
        addressable_memories = staticmethod(lambda: [Memory()])

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(ConfigError, match="this toy device has device"):
        Checkpointing("offload")


def test_remat_is_given_in_three_ways():
    assert checkpointing_of(True) == checkpointing_of("block") == Checkpointing("block")
    assert checkpointing_of(False) == Checkpointing()
    assert checkpointing_of(Checkpointing("dots", 3)) == Checkpointing("dots", 3)


def test_a_model_switches_it_on_and_off():
    plain = model("dense", True)
    on = plain.gradient_checkpointing_enable("dots", every_n_layers=2)
    assert on.runtime.checkpointing == Checkpointing("dots", 2)
    assert on.is_gradient_checkpointing
    assert not plain.is_gradient_checkpointing
    assert on.gradient_checkpointing_disable().runtime == plain.runtime
    documented = plain.activation_checkpointing_enable({"use_reentrant": False}, 3, offload=True)
    assert documented.runtime.checkpointing == Checkpointing("offload", 3)
    assert documented.activation_checkpointing_disable().runtime == plain.runtime
    with pytest.raises(ConfigError, match="Did you mean 'policy'"):
        plain.activation_checkpointing_enable({"polici": "dots"})


def test_own_layers_are_wrapped_by_index():
    layer = lambda w, x: w * x
    assert checkpointed(layer, Checkpointing("block", 2), 1) is layer
    assert checkpointed(layer, Checkpointing("block", 2), 2) is not layer
    assert checkpointed(layer, Checkpointing("block", 2), 2)(3.0, 2.0) == 6.0


def test_a_cache_in_training_is_dropped_with_one_warning():
    plain = model("dense", True)
    on = plain.gradient_checkpointing_enable()
    cache = on.init_cache(2, 8)
    call = lambda m: m(IDS[:, :8], labels=IDS[:, :8], past_key_values=cache)
    _warn_once.cache_clear()
    with pytest.warns(UserWarning, match="Caching is incompatible .* in Decoder"):
        assert call(on).past_key_values is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(on).loss is not None
        assert on(IDS[:, :8], past_key_values=cache).past_key_values is not None
    with pytest.raises(InputError, match="labels cannot be used"):
        call(plain)
