"""How a cache is laid out and stored."""

from __future__ import annotations

import dataclasses

from flaxen.cache.codec import CODECS
from flaxen.core.checks import at_least, one_of, true_or_false

LAYOUTS = ("auto", "dense", "ring", "paged")


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """layout: dense has a slot for each token; ring keeps, in layers with a window, that window
    only; paged takes pages of `page_size` tokens from a pool; auto is ring where it saves memory,
    else dense.

    codec: how keys and values are stored: int8, int4 or fp8, each vector with its own scale; None
    is the model's own dtype. sharded: they lie where the plan puts them, else whole on every
    device.

    Raises:
        ConfigError: for an unknown layout or codec, or a page without tokens.
    """

    layout: str = "auto"
    codec: str | None = None
    page_size: int = 16
    sharded: bool = True

    def __post_init__(self) -> None:
        one_of("cache.layout", self.layout, LAYOUTS)
        if self.codec is not None:
            CODECS[self.codec]
        at_least("cache.page_size", self.page_size, 1)
        true_or_false(**{"cache.sharded": self.sharded})
