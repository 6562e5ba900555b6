"""Sizes of a config, and how its ropes may vary."""

from __future__ import annotations

from random import Random
from typing import Any

Config = dict[str, Any]

UNCHANGED = object()
WIDTHS = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def first(config: Config, names: tuple[str, ...]) -> Any:
    """The value of the first of these keys that is here."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def head_size(config: Config) -> int | None:
    width, heads = first(config, WIDTHS), first(config, HEADS)
    return config.get("head_dim") or config.get("d_kv") or (width and heads and width // heads)


def turned(rng: Random, old: Any, config: Config) -> Any:
    """Other frequencies, or another part of each head that turns."""
    if not isinstance(old, dict):
        return UNCHANGED
    if any(isinstance(value, dict) for value in old.values()):
        return {k: turned(rng, v, config) if isinstance(v, dict) else v for k, v in old.items()}
    new, size = dict(old), head_size(config) or 0
    if "rope_theta" in new:
        new["rope_theta"] = new["rope_theta"] * rng.choice([0.1, 3.0])
    if "partial_rotary_factor" in new:
        parts = [p for p in (0.25, 0.5, 0.75, 1.0) if int(size * p) and int(size * p) % 2 == 0]
        new["partial_rotary_factor"] = rng.choice(parts)
    if "mrope_section" in new:
        return new | {"mrope_section": sections(size)}
    if new.get("rope_type") == "default":
        half = int(size * new.get("partial_rotary_factor", 1.0)) // 2
        new |= rng.choice(scaled(half))
    return new


def scaled(half: int) -> list[Config]:
    """What makes texts longer, of so many frequencies."""
    length = {"original_max_position_embeddings": 16}
    return [
        {},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, **length},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "beta_fast": 8.0, **length},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | length,
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [2.0 + 0.3 * i for i in range(half)],
            "original_max_position_embeddings": 8,
        },
    ]


def sections(size: int) -> list[int]:
    """Pairs of channels of a head for time, rows and columns."""
    side = size // 6
    return [size // 2 - 2 * side, side, side]


def rope_fits(rope: Any, config: Config) -> bool:
    """Whether what it says of heads is so of heads of this size."""
    if not isinstance(rope, dict):
        return True
    if any(isinstance(value, dict) for value in rope.values()):
        return all(rope_fits(value, config) for value in rope.values())
    size = head_size(config) or 0
    turned = int(size * rope.get("partial_rotary_factor", 1.0))
    return sum(rope.get("mrope_section", [size // 2])) == size // 2 and turned % 2 == 0
