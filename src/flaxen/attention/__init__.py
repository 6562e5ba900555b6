"""Attention: what may be seen (a description), how it is computed (mechanisms), and why that one
was chosen.
"""

from flaxen.attention import blockwise, sdpa, vanilla  # noqa: F401  (each registers itself)
from flaxen.attention.call import Call, Mask, Scene, visible
from flaxen.attention.choose import MECHANISMS, Mechanism, choose, explain, known, register

__all__ = [
    "MECHANISMS",
    "Call",
    "Mask",
    "Mechanism",
    "Scene",
    "choose",
    "explain",
    "known",
    "register",
    "visible",
]
