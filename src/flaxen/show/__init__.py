"""Tables and pictures of models, loads and runs."""

from __future__ import annotations

from flaxen.show.attention import attention_choices, cache_bytes_per_token
from flaxen.show.chips import peak_flops
from flaxen.show.curve_page import curves_page
from flaxen.show.devices import device_names, pictures, share_lines
from flaxen.show.flops import model_flops
from flaxen.show.memory import device_memory, peak_memory
from flaxen.show.page import placement_page
from flaxen.show.parts import Part, parts, totals
from flaxen.show.plot import curves_picture, loss_picture
from flaxen.show.tables import parts_tree, table
from flaxen.show.words import human_bytes, human_number, human_seconds

__all__ = [
    "Part",
    "attention_choices",
    "cache_bytes_per_token",
    "curves_page",
    "curves_picture",
    "device_memory",
    "device_names",
    "human_bytes",
    "human_number",
    "human_seconds",
    "loss_picture",
    "model_flops",
    "parts",
    "parts_tree",
    "peak_flops",
    "peak_memory",
    "pictures",
    "placement_page",
    "share_lines",
    "table",
    "totals",
]
