"""Calls of attention on a mesh, and what they give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import MECHANISMS, AttentionSettings, Blocks, Call, Mask, Scene
from flaxen.shard import placement_on

B, N, H = 2, 4, 8


def call(T, mesh=None, S=None, K=2, V=H, mask=None, plan=None, dropout=0.0, softcap=None, **how):
    mechanism = how.pop("mechanism", "ring")
    how = {"blocks": Blocks(q=16, k=16)} | how
    return Call(
        mask=mask or Mask(),
        scale=0.5,
        queries=T,
        keys=S or T,
        heads=N,
        kv_heads=K,
        head_dim=H,
        v_head_dim=V,
        dtype="float32",
        platform="cpu",
        aligned=S is None,
        softcap=softcap,
        dropout=dropout,
        placement=placement_on(mesh, plan),
        settings=AttentionSettings(mechanism, **how),
    )


def scene(c, **parts):
    slots = jnp.arange(c.keys, dtype=jnp.int32)
    return Scene(**{"q_slots": slots, "k_slots": slots, "aligned": c.aligned} | parts)


def arrays(c, dtype="float32"):
    rng = np.random.default_rng(0)
    sizes = (c.queries, N, H), (c.keys, c.kv_heads, H), (c.keys, c.kv_heads, c.v_head_dim)
    q, k, v = (jnp.asarray(rng.standard_normal((B, *size)), dtype) for size in sizes)
    return q, k, v, jnp.asarray(rng.standard_normal((B, c.queries, N, c.v_head_dim)), dtype)


def run(c, where, q, k, v, grad, extras):
    """The result and the gradients by name, from one program."""

    @jax.jit
    def both(q, k, v, extras, grad):
        attend = lambda *args: MECHANISMS[c.settings.mechanism].attend(*args[:3], c, where, args[3])
        out, pull = jax.vjp(attend, q, k, v, extras)
        return out, pull(grad)

    out, (dq, dk, dv, more) = jax.block_until_ready(both(q, k, v, extras, grad))
    found = {"out": out, "q": dq, "k": dk, "v": dv}
    found |= {f.name: getattr(more, f.name) for f in dataclasses.fields(more)}
    return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}
