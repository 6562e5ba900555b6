"""Calls of attention that between them use everything a call can ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxen.attention import Call, Extras, Mask, Scene

LENGTH = 11


@dataclasses.dataclass(frozen=True)
class Case:
    """A call with its arrays: q, k, v, the gradient of the result, the scene and the extras."""

    call: Call
    scene: Scene
    extras: Extras
    arrays: tuple[np.ndarray, ...]


def case(
    mask: Mask = Mask(),
    *,
    length: int = LENGTH,
    keys: int | None = None,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    keep: Any = None,
    segments: Any = None,
    slots: Any = None,
    prefix: Any = None,
    extras: tuple[str, ...] = (),
    batch: int = 2,
    **changes: Any,
) -> Case:
    """Queries are the last `length` of `keys`; rows of `keep` and `segments` are texts of digits."""
    S, (N, K), (H, V) = keys or length, heads, widths
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    digits = lambda rows: None if rows is None else jnp.array([[*map(int, r)] for r in rows])
    aligned, segments = length == S, digits(segments)
    k_slots = jnp.arange(S) if slots is None else jnp.asarray(slots)
    scene = Scene(
        q_slots=k_slots[..., S - length :],
        k_slots=k_slots,
        keep=None if keep is None else digits(keep).astype(bool),
        q_segments=None if segments is None else segments[:, S - length :],
        k_segments=segments,
        prefix=None if prefix is None else jnp.array(prefix),
        aligned=aligned,
    )
    have = {
        "bias": draw(1, N, length, S),
        "row_bias": draw(batch, 1, length, S),
        "slopes": rng.random(N).astype(np.float32),
        "sinks": draw(N),
    }
    extra = Extras(**{name.removeprefix("row_"): jnp.asarray(have[name]) for name in extras})
    call = Call(
        mask=mask,
        scale=H**-0.5,
        queries=length,
        keys=S,
        heads=N,
        kv_heads=K,
        head_dim=H,
        v_head_dim=V,
        dtype="float32",
        platform="cpu",
        aligned=aligned,
        padded=keep is not None,
        packed=segments is not None,
        bias=extra.bias is not None,
        alibi=extra.slopes is not None,
        sinks=extra.sinks is not None,
    )
    arrays = draw(batch, length, N, H), draw(batch, S, K, H), draw(batch, S, K, V)
    out_grad = draw(batch, length, N, V)
    return Case(dataclasses.replace(call, **changes), scene, extra, (*arrays, out_grad))


LEFT, RIGHT, INSIDE = "00011111111", "11111111000", "11100111011"
PACKED = ["00001111222", "01112222222"]

CASES = {
    "causal": case(),
    "one token": case(length=1),
    "one key head": case(heads=(4, 1)),
    "as many key heads": case(heads=(3, 3)),
    "bidirectional": case(Mask(causal=False)),
    "bidirectional window": case(Mask(causal=False, window=3), keep=[LEFT, RIGHT]),
    "window, padded right and inside": case(Mask(window=4), keep=[RIGHT, INSIDE]),
    "window of packed documents": case(Mask(window=3), segments=PACKED),
    "chunks, padded left": case(
        Mask(chunk=4),
        keep=[LEFT, "1" * LENGTH],
        slots=np.arange(LENGTH) - np.array([[3], [0]]),
    ),
    "prefix": case(Mask(prefix=True), prefix=[5, 0], keep=[INSIDE, LEFT]),
    "softcap and bias": case(softcap=1.5, extras=("bias",)),
    "bias of a row, padded left": case(extras=("row_bias",), keep=[LEFT, RIGHT]),
    "ALiBi": case(extras=("slopes",), keep=[LEFT, "1" * LENGTH]),
    "sinks, a row of nothing": case(extras=("sinks",), keep=["0" * LENGTH, LEFT]),
    "narrow values": case(widths=(8, 5), heads=(4, 1)),
    "everything": case(
        Mask(window=5),
        extras=("bias", "slopes", "sinks"),
        keep=[INSIDE, LEFT],
        segments=PACKED,
        softcap=2.0,
        widths=(6, 10),
    ),
    "one query of a cache": case(length=1, keys=LENGTH, keep=[LEFT, RIGHT]),
    "some queries of a cache": case(
        Mask(window=4), length=3, keys=LENGTH, keep=[LEFT, INSIDE], extras=("bias", "sinks")
    ),
}
