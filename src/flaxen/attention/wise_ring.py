"""Ring attention that is always blockwise in both directions, and balanced."""

from __future__ import annotations

import dataclasses

import jax

from flaxen.attention import ring
from flaxen.attention.call import NOTHING, Call, Extras, Scene
from flaxen.attention.choose import Mechanism, register


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """`ring` with `scan_ring` and `balanced`, whatever the settings say."""
    settings = dataclasses.replace(call.settings, scan_ring=True, balanced=True)
    call = dataclasses.replace(call, settings=settings)
    return ring.attend(q, k, v, call, scene, extras)


register(Mechanism("wise_ring", attend, ring.refuse, prefer=lambda call: 0))
