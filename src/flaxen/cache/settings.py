"""How a cache is laid out and stored."""

from __future__ import annotations

import dataclasses

from flaxen.core.checks import true_or_false


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """codec: how keys and values are stored; None is the model's own dtype.

    sharded: keys and values lie where the plan puts them, else whole on every device.
    """

    codec: str | None = None
    sharded: bool = True

    def __post_init__(self) -> None:
        true_or_false(sharded=self.sharded)
