"""Every mechanism, with its gradient, is lowered for hardware that is not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention.flash_cases import case

from flaxen.attention import MECHANISMS, AttentionSettings
from flaxen.core.platform import compiling_for

CANNOT = {("cudnn", "gpu"): "cuDNN is not detected"}
"""(mechanism, platform): a part of the error that stands in the way."""

KERNELS = {
    ("pallas_flash", "tpu"): 3, ("splash", "tpu"): 3, ("flash", "tpu"): 3,
    ("pallas_flash", "gpu"): 3, ("splash", "gpu"): 3, ("flash", "gpu"): 3,
}  # fmt: skip
"""How many of them a forward and backward pass holds."""


def lowered(name: str, platform: str) -> str:
    c = case(T=256, N=2, K=1, H=128, batch=1, settings=AttentionSettings(name))
    call = dataclasses.replace(c.call, dtype="bfloat16", platform=platform)
    shape = lambda heads: jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16)
    reason = MECHANISMS[name].refuse(call)
    if reason:
        pytest.skip(f"refuses: {reason}")

    def run(q: Any, k: Any, v: Any) -> Any:
        attend = MECHANISMS[name].attend
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, call, c.scene), q, k, v)
        return out, pull(out)

    with compiling_for(platform):
        traced = jax.jit(run).trace(shape(2), shape(1), shape(1))
        target = "cuda" if platform == "gpu" else platform
        return traced.lower(lowering_platforms=(target,)).as_text()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", list(MECHANISMS))
def test_it_lowers_or_the_reason_is_known(name, platform):
    if (name, platform) in CANNOT:
        with pytest.raises(Exception, match=CANNOT[name, platform]):
            lowered(name, platform)
        return
    text = lowered(name, platform)
    call = "tpu_custom_call" if platform == "tpu" else "__gpu$xla.gpu.triton"
    assert text.count(f"@{call}(") == KERNELS.get((name, platform), 0)
