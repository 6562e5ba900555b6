"""Every attention mechanism on every mesh against float64: the cases, and how one is measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxen.attention import AttentionSettings, Blocks, Call, Extras, Mask, Scene, choose
from flaxen.attention.choose import mechanisms
from flaxen.shard import Placement, make_mesh, plan_named

MESHES = {
    "float32": ("1", "dp=8", "fsdp=8", "tp=4", "sp=4", "sp=2,tp=2,fsdp=2"),
    "bfloat16": ("1", "sp=2,tp=2,fsdp=2"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and features of one call; `blocks` are small, so that short sequences have several."""

    rows: int = 8
    queries: int = 70
    keys: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    mask: Mask = Mask()
    softcap: float | None = None
    keep: Callable[[int, int], np.ndarray] | None = None
    segments: Callable[[int, int], np.ndarray] | None = None
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    used: int | None = None
    blocks: int = 32


def left(rows: int, keys: int) -> np.ndarray:
    """Row b lacks its first 5 * b tokens."""
    return np.arange(keys)[None] >= 5 * np.arange(rows)[:, None]


def right(rows: int, keys: int) -> np.ndarray:
    return left(rows, keys)[:, ::-1]


def documents(rows: int, keys: int) -> np.ndarray:
    """Three documents in each row, of other lengths in each."""
    return np.stack([np.searchsorted([20 + b, 41 + 2 * b], np.arange(keys)) for b in range(rows)])


def prefixes(rows: int) -> np.ndarray:
    return 3 * np.arange(rows) + 1


CASES: dict[str, Case] = {
    "causal": Case(kv_heads=4),
    "GQA": Case(),
    "MQA": Case(kv_heads=1),
    "window": Case(mask=Mask(window=37)),
    "chunked": Case(mask=Mask(chunk=24)),
    "packed": Case(segments=documents),
    "left pad": Case(keep=left),
    "right pad": Case(keep=right),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "ALiBi": Case(alibi=True),
    "length 1": Case(queries=1, blocks=128),
    "length 127": Case(queries=127, blocks=128),
    "length 128": Case(queries=128, blocks=128),
    "length 129": Case(queries=129, blocks=128),
    "length 1025": Case(queries=1025, rows=2, blocks=128),
    "decode": Case(queries=1, keys=48, used=29),
    "bidirectional": Case(mask=Mask(causal=False)),
    "prefix": Case(mask=Mask(prefix=True)),
    "bias": Case(bias=True),
    "wider keys": Case(head_dim=24),
    "decode, window": Case(queries=1, keys=48, used=29, mask=Mask(window=13)),
    "five on a cache": Case(queries=5, keys=48, used=29),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    arrays: dict[str, np.ndarray]
    scene: Scene
    extras: Extras
    out_grad: np.ndarray


@functools.cache
def inputs(case: Case) -> Inputs:
    """Random numbers; what nobody sees is NaN."""
    rng = np.random.default_rng(7)
    B, T, S = case.rows, case.queries, case.keys or case.queries
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q = normal(B, T, case.heads, case.head_dim)
    k = normal(B, S, case.kv_heads, case.head_dim)
    v = normal(B, S, case.kv_heads, case.v_head_dim)
    first = 0 if case.used is None else case.used - T
    keep = None if case.keep is None else case.keep(B, S)
    if case.used is not None:
        keep = np.broadcast_to(np.arange(S) < case.used, (B, S))
    if keep is not None:
        k, v = (np.where(keep[:, :, None, None], x, np.nan).astype(np.float32) for x in (k, v))
    segments = None if case.segments is None else jnp.asarray(case.segments(B, S))
    scene = Scene(
        q_slots=first + jnp.arange(T, dtype=jnp.int32),
        k_slots=jnp.arange(S, dtype=jnp.int32),
        keep=None if keep is None else jnp.asarray(keep),
        q_segments=segments,
        k_segments=segments,
        prefix=jnp.asarray(prefixes(B)) if case.mask.prefix else None,
        aligned=case.keys is None,
    )
    extras = Extras(
        bias=jnp.asarray(normal(1, case.heads, T, S)) if case.bias else None,
        slopes=jnp.asarray(2.0 ** -np.arange(1, case.heads + 1), jnp.float32)
        if case.alibi
        else None,
        sinks=jnp.asarray(normal(case.heads)) if case.sinks else None,
    )
    return Inputs({"q": q, "k": k, "v": v}, scene, extras, normal(B, T, case.heads, v.shape[-1]))


def call_of(case: Case, mechanism: str, mesh: str, dtype: str) -> Call:
    """The call as a layer would describe it."""
    placement = None if mesh == "1" else Placement(make_mesh(mesh), plan_named("auto"))
    return Call(
        mask=case.mask,
        scale=case.head_dim**-0.5,
        queries=case.queries,
        keys=case.keys or case.queries,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=dtype,
        platform="cpu",
        aligned=case.keys is None,
        softcap=case.softcap,
        padded=case.keep is not None or case.used is not None,
        packed=case.segments is not None,
        bias=case.bias,
        alibi=case.alibi,
        sinks=case.sinks,
        placement=placement,
        settings=AttentionSettings(mechanism, blocks=Blocks(case.blocks, case.blocks)),
    )


def rounded(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """q, k and v as a model of that dtype has them."""
    return {n: np.asarray(jnp.asarray(x, dtype)) for n, x in inputs(case).arrays.items()}


@functools.cache
def truth(case: Case, dtype: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The result and its gradients in float64."""
    given, call = inputs(case), call_of(case, "vanilla", "1", "float64")
    qkv = rounded(case, dtype).values()
    out = reference.attention(*qkv, call, given.scene, given.extras)
    grads = reference.gradients(*qkv, call, given.scene, given.out_grad, given.extras)
    return out, grads


def measure(case: Case, mechanism: str, mesh: str, dtype: str) -> str | tuple[float, float]:
    """Largest errors of the result and of the gradients, or why the mechanism refuses.

    A gradient's error is relative to its own largest number where that is above one.
    """
    call, given = call_of(case, mechanism, mesh, dtype), inputs(case)
    reason = mechanisms(call.settings)[mechanism].refuse(call)
    if reason is not None:
        return reason
    attend = choose(call).attend

    @jax.jit
    def run(arrays: Any, extras: Extras) -> Any:
        def loss(arrays: Any, extras: Extras) -> Any:
            out = attend(*(arrays[n] for n in "qkv"), call, given.scene, extras)
            return (out * given.out_grad).sum(dtype=jnp.float32), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(arrays, extras)

    arrays: Any = rounded(case, dtype)
    if call.placement is not None:
        everywhere = NamedSharding(call.placement.mesh, PartitionSpec())
        arrays = jax.device_put(arrays, everywhere)
    (_, out), (grads, more) = jax.block_until_ready(run(arrays, given.extras))
    want, want_grads = truth(case, dtype)
    found = grads | {n: getattr(more, n) for n in want_grads if n not in grads}
    errors = [_error(found[n], x) / max(1, np.abs(x).max()) for n, x in want_grads.items()]
    return _error(out, want), max(errors)


def _error(got: Any, want: np.ndarray) -> float:
    worst = np.abs(np.asarray(got, np.float64) - want).max()
    return float("inf") if np.isnan(worst) else float(worst)
