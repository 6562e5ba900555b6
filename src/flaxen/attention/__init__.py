"""Attention: what may be seen (a description), how it is computed (mechanisms), and why that one
was chosen.
"""

from flaxen.attention import (  # noqa: F401  (each registers itself)
    blockwise,
    cudnn,
    flash,
    local_ring,
    pallas_flash,
    ring,
    sdpa,
    sharded_vanilla,
    splash,
    tokamax,
    vanilla,
    wise_ring,
)
from flaxen.attention.call import NOTHING, Call, Extras, Mask, Scene, visible
from flaxen.attention.choose import (
    MECHANISMS,
    Mechanism,
    choose,
    explain,
    known,
    register,
    runnable,
)
from flaxen.attention.interface import (
    AttentionInterface,
    AttentionMaskInterface,
    from_hf_function,
)
from flaxen.attention.settings import AttentionSettings, Blocks, Specs

__all__ = [
    "MECHANISMS",
    "NOTHING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "AttentionSettings",
    "Blocks",
    "Call",
    "Extras",
    "Mask",
    "Mechanism",
    "Scene",
    "Specs",
    "choose",
    "explain",
    "from_hf_function",
    "known",
    "register",
    "runnable",
    "visible",
]
