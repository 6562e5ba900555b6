"""What each token of a text adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONGEST = 4
"""Tokens that one character may be made of: its bytes."""


def token_texts(tok: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    """One string a token, special ones too; together they are the decoded text. A token that ends
    within a character adds nothing, the one that completes it adds it all.
    """
    write = lambda some: tok.backend_tokenizer.decode(list(some), skip_special_tokens=False)
    texts: list[str] = []
    before, here = 0, 0  # where the last whole piece begins, and the one that is being read
    for i in range(len(ids)):
        now = write(ids[before : i + 1])
        if now.endswith("\ufffd") and i + 1 < len(ids) and i - here < LONGEST:
            texts.append("")
            continue
        texts.append(now[len(write(ids[before:here])) :])
        before, here = here, i + 1
    return texts
