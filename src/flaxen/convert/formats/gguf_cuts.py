"""How text is cut into words before byte-level BPE: GGUF's name for it, and the rule itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

# By `tokenizer.ggml.pre`. None is GPT-2's own cutting.
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": r"\p{N}",
    "llama-bpe": rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",
    "smaug-bpe": rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|\p{{N}}|{_REST}",
    "tekken": (
        rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SAME_AS = {
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
# These take a word that is in the vocabulary whole, and begin with BOS unless told otherwise.
WHOLE_WORDS = {"llama-bpe", "tekken"}
# These cut by GPT-2's rule what their own has left.
AND_GPT2 = {"gpt-2", "default", "smollm"}


def rule_of(tokenizer: Mapping[str, Any]) -> str | None:
    """GGUF's name for the way a tokenizer.json cuts text; None if it has none here."""
    steps = tokenizer.get("pre_tokenizer") or {}
    *before, last = steps.get("pretokenizers", [steps])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True) or len(before) > 1:
        return None
    pattern = _pattern(before[0]) if before else None
    if before and pattern is None:
        return None
    found = pattern, last.get("use_regex", True), bool(tokenizer["model"].get("ignore_merges"))
    known = {(SPLITS[r], r in AND_GPT2, r in WHOLE_WORDS): r for r in reversed(SPLITS)}
    return known.get(found)


def _pattern(step: Mapping[str, Any]) -> str | None:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else None
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step.get("invert"):
        return None
    return step["pattern"].get("Regex")
