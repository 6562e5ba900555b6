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
}
"""Experts have an axis of their own; some have their sequence cut."""

SAME = {
    "llama_rope_dynamic": "llama",
    "llama_rope_llama3": "llama",
    "llama_rope_yarn": "llama",
    "mistral": "starcoder2",
    "qwen3": "olmo2",
    "qwen3_moe": "qwen2_moe",
    "olmo": "llama",
    "smollm3": "llama",
    "ernie4_5": "llama",
    "glm4": "glm",
    "gemma": "gemma3_text",
    "gemma2": "gemma3_text",
    "cohere": "cohere2",
    "gpt_neo": "gpt2",
    "persimmon": "gpt_neox",
    "falcon_rw_style": "falcon",
    "falcon_mamba": "mamba",
    "lfm2": "lfm2_moe",
    "bamba": "granitemoehybrid",
    "olmo3": "olmo2",
    "arcee": "llama",
    "seed_oss": "llama",
    "ministral": "llama",
    "helium": "llama",
    "exaone4": "olmo2",
    "glm4_moe": "deepseek_v3",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "qwen2_moe",
    "gpt_bigcode": "gpt2",
    "gptj": "gpt_neox",
    "phi": "gpt_neox",
    "granite": "llama",
    "qwen2": "llama",
    "hunyuan_v1_dense": "llama",
    "llama_rope_linear": "llama",
    "olmoe": "mixtral",
    "opt_350m_style": "opt",
    "falcon_7b_style": "falcon",
    "stablelm": "phi3",
}
"""These are made, cut and cached as another case is."""


def alike(name: str, *rest: Any) -> Any:
    """Parameters of a test that shows little new where a case is like another."""
    return pytest.param(name, *rest, marks=[pytest.mark.exhaustive] if name in SAME else [])


def marked(names: Iterable[str]) -> list[Any]:
    """`alike` for each of some cases."""
    return [alike(name) for name in names]


def runs() -> list[Any]:
    """Every case and where it runs."""
    return [
        alike(name, mesh)
        for name in golden.cases()
        for mesh in SEVERAL.get(name, [OTHERS.get(name) or OTHERS.get(SAME.get(name, ""), USUAL)])
    ]
