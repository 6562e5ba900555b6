"""Calls, scenes and arrays for tests of the kernels, and the comparison with float64 NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import (
    MECHANISMS,
    NOTHING,
    AttentionSettings,
    Blocks,
    Call,
    Extras,
    Mask,
    Scene,
)

SMALL = AttentionSettings(blocks=Blocks(q=32, k=32, k_major=64, q_major_dkv=64))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, with the arrays that go with it."""

    call: Call
    scene: Scene
    extras: Extras = NOTHING
    nan_keys: Any = None
    batch: int = 2


def case(
    T: int = 70, S: int | None = None, N: int = 4, K: int = 2, H: int = 8, Hv: int | None = None,
    mask: Mask | None = None, keep: Any = None, segments: Any = None, prefix: Any = None,
    first: int | None = None, slopes: Any = None, sinks: Any = None, softcap: float | None = None,
    settings: AttentionSettings = SMALL, nan_keys: Any = None, batch: int = 2, shift: int = 0,
) -> Case:  # fmt: skip
    """`first` is the slot of the first query where queries do not stand at their keys; `shift` is
    how far slots lie before what padding on the left makes of them.
    """
    S, aligned = S or T, first is None
    array = lambda x, dtype: None if x is None else jnp.array(x, dtype)
    segments = array(segments, jnp.int32)
    scene = Scene(
        q_slots=jnp.arange(T) + (first or 0) - shift,
        k_slots=jnp.arange(S) - shift,
        keep=array(keep, bool),
        q_segments=segments,
        k_segments=segments,
        prefix=array(prefix, jnp.int32),
        aligned=aligned,
    )
    call = Call(
        mask or Mask(), 0.3, T, S, N, K, H, Hv or H, "float32", "cpu", aligned=aligned,
        softcap=softcap, padded=keep is not None, packed=segments is not None,
        alibi=slopes is not None, sinks=sinks is not None, settings=settings,
    )  # fmt: skip
    extras = Extras(slopes=array(slopes, jnp.float32), sinks=array(sinks, jnp.float32))
    return Case(call, scene, extras, nan_keys, batch)


def arrays(c: Case, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """q, k, v and the gradient of the output."""
    rng, call = np.random.default_rng(0), c.call
    make = lambda length, heads, width: jnp.asarray(
        rng.standard_normal((c.batch, length, heads, width)), dtype
    )
    q, grad = (make(call.queries, call.heads, w) for w in (call.head_dim, call.v_head_dim))
    k, v = (make(call.keys, call.kv_heads, w) for w in (call.head_dim, call.v_head_dim))
    if c.nan_keys is not None:
        k, v = (x.at[:, jnp.array(c.nan_keys)].set(jnp.nan) for x in (k, v))
    return q, k, v, grad


def compare(
    name: str, c: Case, atol: float = 1e-5, dtype: Any = jnp.float32, gradients: bool = True
) -> None:
    """Output and all gradients of a mechanism against float64."""
    q, k, v, grad = arrays(c, dtype)
    call = dataclasses.replace(c.call, dtype=jnp.dtype(dtype).name)
    assert MECHANISMS[name].refuse(call) is None

    def run(q: Any, k: Any, v: Any, extras: Extras, grad: Any) -> Any:
        attend = MECHANISMS[name].attend
        out, pull = jax.vjp(
            lambda q, k, v, extras: attend(q, k, v, call, c.scene, extras), q, k, v, extras
        )
        return out, pull(grad) if gradients else None

    out, grads = jax.block_until_ready(jax.jit(run)(q, k, v, c.extras, grad))
    scene = jax.tree.map(np.asarray, c.scene)  # looked up one pair at a time
    want = reference.attention(q, k, v, c.call, scene, c.extras)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=atol, rtol=atol)
    if grads is None:
        return
    want = reference.gradients(q, k, v, c.call, scene, grad, c.extras)
    got = dict(zip("qkv", grads[:3], strict=True))
    got |= {n: x for n in ("slopes", "sinks") if (x := getattr(grads[3], n)) is not None}
    for part, x in got.items():
        size = max(1.0, float(np.abs(want[part]).max()))
        np.testing.assert_allclose(
            np.asarray(x, np.float64) / size, want[part] / size, atol=atol, err_msg=part
        )
