"""Attention: what may be seen (a description), how it is computed (mechanisms), and why that one
was chosen.
"""

from flaxen.attention import (  # noqa: F401  (each registers itself)
    blockwise,
    cudnn,
    sdpa,
    sharded_vanilla,
    vanilla,
)
from flaxen.attention.call import NOTHING, Call, Extras, Mask, Scene, visible
from flaxen.attention.choose import MECHANISMS, Mechanism, choose, explain, known, register
from flaxen.attention.settings import AttentionSettings, Blocks, Specs

__all__ = [
    "MECHANISMS",
    "NOTHING",
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
    "known",
    "register",
    "visible",
]
