"""What each token of a text adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEFORE = 8
"""Tokens before one that decide how it is written."""


def token_texts(tok: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    """One string a token, special ones too; together they are the decoded text. A token that ends
    within a character adds nothing, the one that completes it adds it all.
    """
    write = lambda some: tok.backend_tokenizer.decode(list(some), skip_special_tokens=False)
    texts, start = [], 0
    for i in range(len(ids)):
        before, now = write(ids[start:i]), write(ids[start : i + 1])
        if now.endswith("\ufffd") and i + 1 < len(ids) and i - start < BEFORE:
            texts.append("")
            continue
        done = sum(map(len, texts[start:i]))
        before = now[:done] if len(before) != done else before
        texts.append(now[len(before) :])
        start = max(start, i + 1 - BEFORE)
    return texts
