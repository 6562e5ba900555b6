"""On which meshes the golden cases run, and which of them stand for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import golden
import pytest

MESHES = ["dp=8", "fsdp=8", "tp=2,fsdp=4", "sp=2,tp=2,fsdp=2"]
USUAL = "tp=2,fsdp=4"
EXPERTS = "ep=2,tp=2,fsdp=2"

SEVERAL = {"llama": MESHES, "gemma3_text": MESHES, "mixtral": [EXPERTS, "dp=2,ep=2,tp=2"]}
"""All arrangements; every other case runs on one."""

OTHERS = {
    "qwen2_moe": "dp=2,ep=4",
    "phimoe": "dp=2,ep=4",
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "llama4_text": EXPERTS,
    "deepseek_v2": EXPERTS,
    "deepseek_v3": "sp=2,ep=2,tp=2",
    "phi3": "sp=2,tp=2,fsdp=2",
    "glm": "sp=2,tp=2,fsdp=2",
    "mpt": "sp=2,tp=2,fsdp=2",
    "mamba2": "sp=2,tp=2,fsdp=2",
    "jamba": EXPERTS,
    "lfm2_moe": EXPERTS,
    "granitemoehybrid": EXPERTS,
    "ernie4_5_moe": EXPERTS,
    "qwen3_moe": "dp=2,ep=4",
    "hunyuan_v1_moe": "dp=2,ep=4",
    "glm4_moe": "sp=2,ep=2,tp=2",
    "glm4": "sp=2,tp=2,fsdp=2",
    "granitemoeshared": EXPERTS,
    "bamba": EXPERTS,
    "lfm2": "sp=2,tp=2,fsdp=2",
}
"""Experts have an axis of their own; some have their sequence cut."""

UNLIKE = [
    *("llama", "gemma3_text", "gpt2", "opt", "bloom", "falcon", "phi3"),
    *("mixtral", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3"),
    *("mamba2", "jamba", "lfm2_moe", "qwen3_next", "minimax"),
]
"""Between them they have every part that is cut or cached in a way of its own."""


def alike(name: str, *rest: Any) -> Any:
    """Parameters of a test that shows little new for a case made of the parts of others."""
    return pytest.param(name, *rest, marks=[] if name in UNLIKE else [pytest.mark.exhaustive])


def marked(names: Iterable[str]) -> list[Any]:
    """`alike` for each of some cases."""
    return [alike(name) for name in names]


def runs() -> list[Any]:
    """Every case and where it runs."""
    return [
        alike(name, mesh)
        for name in golden.cases()
        for mesh in SEVERAL.get(name, [OTHERS.get(name, USUAL)])
    ]
