"""Ring attention among neighbours: keys turn only as far as a window or chunk reaches."""

from __future__ import annotations

import jax

from flaxen.attention import ring
from flaxen.attention.call import NOTHING, Call, Extras, Scene
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.ring_layout import plan


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """A device asks the ceil((window - 1) / tokens per device) devices before it.

    That is known where a sequence attends causally to itself, in order; elsewhere, and without a
    window, everyone is asked, as `ring` does. On one device there are no collectives.
    """
    return ring.turned(q, k, v, call, scene, extras, plan(call, near=True))


register(Mechanism("local_ring", attend, ring.refuse, prefer=lambda call: 0))
