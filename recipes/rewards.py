"""Rewards for `recipes/grpo.yaml`: called with all prompts and completions of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def short_and_polite(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """One for an answer that thanks, less for each word of it."""
    answers = [text(completion) for completion in completions]
    return [float("thank" in x.lower()) - len(x.split()) / 50 for x in answers]


def text(completion: Any) -> str:
    """Of a plain completion, or of the messages of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
