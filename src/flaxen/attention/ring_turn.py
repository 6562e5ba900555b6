"""One device's part of ring attention: its queries meet the keys of all, and so do their gradients.

Only the result and the logarithm of the softmax's denominator are kept for the backward pass, which
turns once more: the gradients of keys and values travel with them and arrive at home.

B batch, K kv_heads, G group, T queries, S keys, N heads, H head_dim; a leading axis of tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import online
from flaxen.attention.call import Call, Extras, Scene, visible
from flaxen.attention.online import Running
from flaxen.attention.ring_layout import Ring, hidden
from flaxen.core.tree import module


@module
class Queries:
    """What stays: q (B, K, G, T, H) of each tile, where its tokens stand, its rows of a bias; for
    the backward pass the gradient of the result, `lse` and the weighted mean.
    """

    q: jax.Array
    slots: jax.Array
    segments: jax.Array | None = None
    bias: jax.Array | None = None
    grad: jax.Array | None = None
    lse: jax.Array | None = None
    mean: jax.Array | None = None


@module
class Keys:
    """What travels: k (B, K, S, H) and v of each tile, where its tokens stand, its number."""

    k: jax.Array
    v: jax.Array
    slots: jax.Array
    number: jax.Array
    keep: jax.Array | None = None
    segments: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def around(
    call: Call,
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    number: jax.Array,
    scene: Scene,
    extras: Extras,
) -> jax.Array:
    """Attention of local queries (B, T, N, H) to the keys of all devices.

    number: (tiles,) which tiles of all keys the local ones are.
    """
    return _forward(call, ring, q, k, v, number, scene, extras)[0]


def _forward(call: Call, ring: Ring, *args: Any) -> Any:
    q, k, v, number, scene, extras = args
    asking, keys = _tiles(ring, q, k, v, number, scene, extras)
    now = jax.vmap(functools.partial(online.start, v_head_dim=v.shape[-1]))(asking.q)

    def turn(carry: Any, _: None) -> Any:
        now, keys = carry
        following = _moved(keys, ring)  # Under way while this device computes.
        return (_visit(call, now, asking, keys, scene, extras), following), None

    # The last move is for nothing; without it, twice as much would have to be compiled.
    (now, _), _ = jax.lax.scan(turn, (now, keys), length=ring.hops + 1)
    if ring.few:
        now = _joined(now, ring)
    out, lse = jax.vmap(lambda now: online.finish(now, extras.sinks))(now)
    out = online.flat(_whole(out, 3)).astype(v.dtype)
    return out, (*args, out, lse)


def _visit(
    call: Call, now: Running, asking: Queries, keys: Keys, scene: Scene, extras: Extras
) -> Running:
    """Every tile of queries looks at every tile of keys that it may see something of."""

    def tile(_: None, part: tuple[Running, Queries]) -> Any:
        now, mine = part

        def look(now: Running, theirs: Keys) -> Any:
            here = _meeting(mine, theirs, scene)

            def seen(now: Running) -> Running:
                k, v, terms = _prepared(call, mine, theirs, here, extras)
                how = {"scale": call.scale, "softcap": call.softcap}
                return online.step(now, mine.q, k, v, terms, **how)

            return jax.lax.cond(hidden(call.mask, here), lambda now: now, seen, now), None

        return None, jax.lax.scan(look, now, keys)[0]

    return jax.lax.scan(tile, None, (now, asking))[1]


def _backward(call: Call, ring: Ring, saved: Any, grad: jax.Array) -> Any:
    q, k, v, number, scene, extras, out, lse = saved
    if ring.few:
        # Every device has all queries, and a share of the gradient of their one result.
        grad = jax.lax.psum(grad, ring.axis)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    asking, keys = _tiles(ring, q, k, v, number, scene, extras)
    cut = lambda x: _cut(online.grouped(x, k.shape[2]), 3, ring.queries.tile)
    mean = jax.vmap(online.weighted_mean)(cut(out.astype(wide)), cut(grad.astype(wide)))
    asking = dataclasses.replace(asking, grad=cut(grad.astype(v.dtype)), lse=lse, mean=mean)
    zeros = lambda x: None if x is None else jnp.zeros(x.shape, wide)
    mine = zeros(asking.q), zeros(asking.bias)
    theirs, slopes = (zeros(keys.k), zeros(keys.v)), zeros(extras.slopes)
    visit = functools.partial(_visit_back, call, asking, scene, extras)

    def turn(carry: Any, _: None) -> Any:
        keys, gained = carry
        following = _moved(keys, ring)
        mine, theirs, slopes = visit(keys, gained)
        return (following, (mine, _moved(theirs, ring), slopes)), None

    start = keys, (mine, theirs, slopes)
    (_, (mine, theirs, slopes)), _ = jax.lax.scan(turn, start, length=ring.hops + 1)
    dq: Any
    dq, bias = mine
    dk, dv = _returned(theirs, ring)
    sinks = extras.sinks
    if sinks is not None:
        each = jax.vmap(lambda lse, mean: online.sink_gradients(sinks, lse, mean))(lse, mean)
        sinks = each.sum(0) / (ring.size if ring.few else 1)
    like = lambda x, source: None if x is None else x.astype(source.dtype)
    return (
        online.flat(_whole(dq, 3)).astype(q.dtype),
        _whole(dk, 2).swapaxes(1, 2).astype(k.dtype),
        _whole(dv, 2).swapaxes(1, 2).astype(v.dtype),
        None,
        None,
        Extras(
            bias=None if bias is None else like(_whole(bias, 2), extras.bias),
            slopes=like(slopes, extras.slopes),
            sinks=sinks,
        ),
    )


def _visit_back(
    call: Call, asking: Queries, scene: Scene, extras: Extras, keys: Keys, gained: Any
) -> Any:
    """What the same meetings add to ((dq, dbias) by tiles, (dk, dv) by tiles, dslopes)."""

    def tile(carry: Any, part: Any) -> Any:
        (theirs, slopes), (own, mine) = carry, part

        def look(carry: Any, part: Any) -> Any:
            keys, (dk, dv) = part
            here = _meeting(mine, keys, scene)

            def seen(gained: Any) -> Any:
                (dq, bias), slopes, dk, dv = gained
                k, v, terms = _prepared(call, mine, keys, here, extras)
                more_q, more_k, more_v, ds = online.block_gradients(
                    mine.q, k, v, mine.grad, mine.lse, mine.mean, terms,
                    scale=call.scale, softcap=call.softcap,
                )  # fmt: skip
                if slopes is not None:
                    far = online.distance(here)[:, None]
                    slopes = slopes - (ds * far).sum((0, 3, 4)).reshape(-1)
                if bias is not None:
                    bias = _added(bias, ds, keys.number)
                return (dq + more_q, bias), slopes, dk + more_k, dv + more_v

            same = lambda gained: gained
            gained = jax.lax.cond(hidden(call.mask, here), same, seen, (*carry, dk, dv))
            return gained[:2], gained[2:]

        (own, slopes), theirs = jax.lax.scan(look, (own, slopes), (keys, theirs))
        return (theirs, slopes), own

    mine, theirs, slopes = gained
    (theirs, slopes), mine = jax.lax.scan(tile, (theirs, slopes), (mine, asking))
    return mine, theirs, slopes


def _tiles(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    number: jax.Array,
    scene: Scene,
    extras: Extras,
) -> tuple[Queries, Keys]:
    """What stays and what travels, in tiles."""
    asked, asking = ring.keys.tile, ring.queries.tile
    major = lambda x: _cut(x.swapaxes(1, 2), 2, asked)
    last: Any = lambda x, tile: None if x is None else _cut(x, x.ndim - 1, tile)
    bias = extras.bias
    queries = Queries(
        q=_cut(online.grouped(q, k.shape[2]), 3, asking),
        slots=last(scene.q_slots, asking),
        segments=last(scene.q_segments, asking),
        bias=None if bias is None else _cut(bias, 2, asking),
    )
    keys = Keys(
        k=major(k),
        v=major(v),
        slots=last(scene.k_slots, asked),
        number=number,
        keep=last(scene.keep, asked),
        segments=last(scene.k_segments, asked),
    )
    return queries, keys


def _meeting(mine: Queries, theirs: Keys, scene: Scene) -> Scene:
    """Where the tokens of two tiles stand."""
    return Scene(
        q_slots=mine.slots,
        k_slots=theirs.slots,
        keep=theirs.keep,
        q_segments=mine.segments,
        k_segments=theirs.segments,
        prefix=scene.prefix,
    )


def _prepared(
    call: Call, mine: Queries, theirs: Keys, here: Scene, extras: Extras
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values, zero where nobody sees them since 0 * NaN is NaN, and the score terms."""
    used = visible(call.mask, here).any(1)[:, None, :, None]
    k, v = (jnp.where(used, x, 0) for x in (theirs.k, theirs.v))
    bias, size = mine.bias, theirs.k.shape[2]
    if bias is not None:
        bias = jax.lax.dynamic_slice_in_dim(bias, theirs.number * size, size, axis=3)
    extras = Extras(bias=bias, slopes=extras.slopes)
    return k, v, online.score_terms(call.mask, here, extras, k.shape[1])


def _added(bias: jax.Array, ds: jax.Array, number: jax.Array) -> jax.Array:
    """The gradient of a tile's rows of a bias, with that of one tile of scores in its place."""
    ds = ds.reshape(ds.shape[0], -1, *ds.shape[3:])
    ds = ds.sum([axis for axis in (0, 1) if bias.shape[axis] == 1], keepdims=True)
    first, size = number * ds.shape[3], ds.shape[3]
    old = jax.lax.dynamic_slice_in_dim(bias, first, size, axis=3)
    return jax.lax.dynamic_update_slice_in_dim(bias, old + ds, first, axis=3)


def _moved(x: Any, ring: Ring) -> Any:
    """Everything to the next device, if there is one to ask."""
    return _sent(x, ring, 1) if ring.hops else x


def _returned(x: Any, ring: Ring) -> Any:
    """What has moved after every visit, back at home: a full turn ends there by itself."""
    moves = (ring.hops + 1) % ring.size
    return _sent(x, ring, -moves) if ring.hops and moves else x


def _sent(x: Any, ring: Ring, by: int) -> Any:
    """Everything to the device `by` places on."""
    routes = [(i, (i + by) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, routes), x)


def _joined(now: Running, ring: Ring) -> Running:
    """What all devices found for the same queries."""
    top = jax.lax.pmax(now.top, ring.axis)
    share = jnp.exp(now.top - jnp.where(jnp.isfinite(top), top, 0))
    total, mixed = (jax.lax.psum(x * share, ring.axis) for x in (now.total, now.mixed))
    return Running(top=top, total=total, mixed=mixed)


def _cut(x: jax.Array, axis: int, tile: int) -> jax.Array:
    """One axis as tiles, which come first."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :]), axis, 0)


def _whole(x: jax.Array, axis: int) -> jax.Array:
    """Tiles as one axis again."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


around.defvjp(_forward, _backward)
