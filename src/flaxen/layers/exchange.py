"""Tokens that travel to the devices that hold their experts, and their results back.

Letters: N tokens of a device, k experts of a token, n devices, C places for tokens in a parcel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

SPARE = 1.25
"""Places in a parcel, times those that tokens need whose experts are drawn by chance."""

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def exchanged(
    mix: Mix,
    axes: tuple[str, ...],
    held: int,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """The weighted sum over each token's experts, inside `shard_map`, where every device along
    `axes` has tokens of its own and `held` consecutive experts.

    x (B, T, D), weights and chosen (B, T, k) -> (B, T, D). mix(x, weights, chosen) is the same sum
    over the experts held here, whose numbers begin at 0 and of which others are left out.

    A token goes once to each device that has experts of its, whatever their number. Parcels have a
    fixed size, as compiled programs need it: a quarter more than chance would fill. No token is
    ever dropped: what finds no place travels in another round, and there are as many as the busiest
    pair of devices needs (on all of them, since they take part together). So there is never
    room for all tokens of all devices on one of them, as a ragged all-to-all would need it. The
    backward pass computes rounds after the first again.
    """
    devices = jax.lax.axis_size(axes)
    tokens, width, k = x.shape[0] * x.shape[1], x.shape[-1], chosen.shape[-1]
    flat = (x.reshape(tokens, width), weights.reshape(tokens, k), chosen.reshape(tokens, k))
    going = (flat[2] // held == jnp.arange(devices)[:, None, None]).any(-1)
    places = _places(tokens, devices, k)
    rounds = -(-tokens // places)
    queue = jnp.argsort(~going, axis=1, stable=True)
    queue = jnp.where(jnp.arange(tokens) < going.sum(1, keepdims=True), queue, tokens)
    queue = jnp.pad(queue, [(0, 0), (0, rounds * places - tokens)], constant_values=tokens).reshape(
        devices, rounds, places
    )

    def travel(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axes, 0, 0)

    def one(ids: jax.Array) -> jax.Array:
        """A round of the tokens with these numbers (n, C); `tokens` is an empty place."""
        rows, shares, experts = (
            a.at[ids].get(mode="fill", fill_value=empty)
            for a, empty in zip(flat, (0, 0, -1), strict=True)
        )
        there = experts - held * jnp.arange(devices)[:, None, None]
        there = jnp.where((there >= 0) & (there < held), there, -1)
        back = travel(mix(travel(rows), travel(shares), travel(there)))
        return jnp.zeros((tokens, width), back.dtype).at[ids].add(back, mode="drop")

    y = one(queue[:, 0])
    if rounds > 1:
        needed = -(-jax.lax.pmax(going.sum(1).max(), axes) // places)
        y = y + _rest(one, queue, needed, y)
    return y.reshape(x.shape)


def _rest(
    one: Callable[[jax.Array], jax.Array], queue: jax.Array, needed: jax.Array, like: jax.Array
) -> jax.Array:
    """The sum of those rounds after the first that are `needed`, queue (n, rounds, C)."""
    zeros = jnp.zeros_like(like)
    later = jax.checkpoint(one, prevent_cse=False)

    def step(y: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, ids = each
        return y + jax.lax.cond(number < needed, later, lambda _: zeros, ids), None

    def all_rounds(queue: jax.Array) -> jax.Array:
        numbers = jnp.arange(1, queue.shape[1])
        return jax.lax.scan(step, zeros, (numbers, jnp.moveaxis(queue[:, 1:], 1, 0)))[0]

    return jax.lax.cond(needed > 1, all_rounds, lambda _: zeros, queue)


def _places(tokens: int, devices: int, k: int) -> int:
    """C: a token goes to a device with probability 1 - (1 - 1/n)^k if its experts are drawn by
    chance.
    """
    share = 1 - (1 - 1 / devices) ** k
    return min(tokens, 8 * math.ceil(SPARE * share * tokens / 8))
