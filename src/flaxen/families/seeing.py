"""What language models that see share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.families.common import LLAMA
from flaxen.models.decoder import Decoder
from flaxen.models.vision_language import VisionLanguage

TEXT_KEYS = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
"""Tokens around pictures, which are words like others."""


def seeing(
    decoder: Decoder,
    vision: Any,
    tokens: tuple[int, ...],
    axes: int = 1,
    kind: type[VisionLanguage] = VisionLanguage,
) -> VisionLanguage:
    """The same language model, with eyes."""
    fields = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(Decoder)}
    return kind(**fields, vision=vision, tokens=tokens, axes=axes)


def only_class(c: Any, *names: str) -> None:
    """
    Raises:
        ConfigError: another class than these.
    """
    asked = next(iter(c.get("architectures") or ()), names[0])
    if asked not in names:
        raise ConfigError(f"architectures says {asked!r}; expected one of {', '.join(names)}.")


def under(prefix: str, names: Mapping[str, str] = LLAMA) -> dict[str, Any]:
    """A language model's names with a prefix, that of the head too."""
    plain = {k: f"{prefix}.{v}" if v.startswith("model.") else v for k, v in names.items()}
    return plain | {"lm_head": f"{prefix}.lm_head"}
