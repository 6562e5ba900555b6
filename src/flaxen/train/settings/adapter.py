"""Low-rank adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """`lora_rank` None trains every weight; else adapters of that rank on `lora_targets`."""

    lora_rank: int | None = setting(None, "Inner width of adapters; default: none.", least=1)
    lora_alpha: float = setting(16.0, "Scale is alpha / rank.", above=0)
    lora_targets: str | Sequence[str] | None = setting(
        None,
        "Modules, e.g. q_proj, or one regular expression; default: all projections.",
        flag=list[str],
    )
    lora_rank_stabilised: bool = setting(False, "Scale is alpha / sqrt(rank).")
