"""Which attention mechanism each kind of layer would use, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.attention import Call, explain
from flaxen.core.platform import platform
from flaxen.core.tree import walk
from flaxen.layers.attention import Attends
from flaxen.layers.runtime import PLAIN, Runtime


def attention_choices(
    tree: Any, *, queries: int, keys: int, dtype: str, runtime: Runtime = PLAIN
) -> list[dict[str, Any]]:
    """Each distinct attention call: its description, how many layers make it, what may do it.

    `mechanisms` are (name, reason) with the chosen one first. `queries` = `keys` is a prefill,
    `queries` = 1 a decode step, in which an encoder or a vision tower has no part.
    """
    seen = tree if queries == keys else getattr(tree, "layers", tree)
    counts: dict[Call, int] = {}
    for layer in (m for m in walk(seen) if isinstance(m, Attends)):
        call = _call(layer, queries, keys, dtype, runtime)
        counts[call] = counts.get(call, 0) + _layers(layer)
    return [
        {"layers": count, "call": _facts(call), "mechanisms": explain(call)}
        for call, count in counts.items()
    ]


def _call(layer: Attends, queries: int, keys: int, dtype: str, runtime: Runtime) -> Call:
    heads, kv_heads, head_dim, v_head_dim = layer.sizes
    return Call(
        mask=layer.mask,
        scale=layer.scale,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        platform=platform(),
        aligned=queries == keys,
        softcap=layer.softcap,
        placement=runtime.placement,
        settings=runtime.attention,
    )


def _facts(call: Call) -> dict[str, Any]:
    """What the layer asks, in plain values."""
    mesh = None if call.placement is None else dict(call.placement.mesh.shape)
    facts = dataclasses.asdict(dataclasses.replace(call, placement=None))
    del facts["settings"], facts["placement"]
    return facts | {"mesh": mesh}


def _layers(layer: Attends) -> int:
    """How many layers a (stacked) attention stands for."""
    return layer.o_proj.weight.shape[0] if len(layer.o_proj.weight.shape) == 4 else 1


def cache_bytes_per_token(tree: Any, itemsize: int) -> int:
    """Bytes that one more token of one row takes, in all layers together."""
    layers = (m for m in walk(tree) if isinstance(m, Attends))
    return sum(a.remembers * itemsize for a in layers)
