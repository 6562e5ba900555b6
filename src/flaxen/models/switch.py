"""Models that see every position in another way once a text is long enough (LongRoPE)."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer

from flaxen.cache import Cache
from flaxen.core.errors import CacheError
from flaxen.core.tree import walk
from flaxen.layers.attention import Attends
from flaxen.shard import on_host


def switch(decoder: Any) -> int | None:
    """The number of tokens past which the keys of earlier ones are others, if there is one."""
    ropes = [m.rope for m in walk(decoder.layers) if isinstance(m, Attends) and m.rope]
    return min((r.switch for r in ropes if r.switch), default=None)


def same_side(decoder: Any, cache: Cache, new: Any) -> None:
    """Check, outside of compiled code, that a cache's keys stay right with `new` more tokens, a
    number for each row or one for all.

    Raises:
        CacheError: where these would be the first ones past the switch.
    """
    last = switch(decoder)
    if last is None or isinstance(cache.lengths, Tracer) or isinstance(new, Tracer):
        return
    lengths = on_host(cache.lengths)
    held, most = int(lengths.max()), int((lengths + np.asarray(new)).max())
    if 0 < held <= last < most:
        raise CacheError(
            f"Past {last} tokens this model sees every position in another way, so a cache of "
            f"{held} cannot grow to {most}. Give the whole conversation anew, without the cache, "
            "or ask for fewer tokens."
        )
