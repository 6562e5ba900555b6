"""Low-rank adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """`lora_rank` None trains every weight; else adapters of that rank on `lora_targets`."""

    lora_rank: int | None = setting(
        None, "Inner width of adapters. Command line: 8, unless --full or a file is given.", least=1
    )
    lora_alpha: float = setting(16.0, "Scale is alpha / rank.", above=0)
    lora_targets: str | Sequence[str] | None = setting(
        None,
        "Modules, e.g. q_proj, or one regular expression; default: all projections.",
        flag=list[str],
    )
    lora_rank_stabilised: bool = setting(False, "Scale is alpha / sqrt(rank).")
    use_dora: bool = setting(False, "Lengths of rows are trained too (DoRA).")
    lora_dropout: float = setting(0.0, "Of the inputs of adapters.", least=0, most=0.999)
    lora_init: str = setting("normal", "How adapters start: normal, gaussian, kaiming, pissa.")
    rank_pattern: dict[str, int] | None = setting(
        None, "Other ranks for projections whose path an expression ends.", least=1, flag=False
    )
    alpha_pattern: dict[str, float] | None = setting(
        None, "Other alphas, likewise.", above=0, flag=False
    )
    layers_to_transform: Sequence[int] | None = setting(
        None, "The only layers that get adapters, from 0.", least=0, flag=False
    )
    modules_to_save: Sequence[str] | None = setting(
        None, "Heads and tables that are trained in full beside adapters.", flag=list[str]
    )


def without_rank(settings: Any) -> Iterator[str]:
    """What is asked of adapters where there are none: all weights would be trained instead."""
    names = [
        field.name
        for field in dataclasses.fields(AdapterSettings)
        if field.name != "lora_rank" and getattr(settings, field.name) != field.default
    ]
    if settings.lora_rank is None and names:
        yield f"{' and '.join(names)} are of adapters, of which there are none; say lora_rank"
