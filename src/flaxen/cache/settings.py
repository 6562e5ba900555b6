"""How a cache is laid out and stored."""

from __future__ import annotations

import dataclasses

from flaxen.cache.codec import CODECS
from flaxen.core.errors import ConfigError, did_you_mean

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
        if self.layout not in LAYOUTS:
            near = did_you_mean(str(self.layout), LAYOUTS)
            raise ConfigError(f"Unknown cache layout {self.layout!r}.{near}")
        if self.codec is not None:
            CODECS[self.codec]
        if type(self.page_size) is not int or self.page_size < 1:
            raise ConfigError(
                f"page_size is {self.page_size!r}; expected a whole number of tokens above 0."
            )
