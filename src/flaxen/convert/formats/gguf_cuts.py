"""How text is cut into words before byte-level BPE: GGUF's name for it, and the rules themselves,
as they stand in the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What byte-level tokenizers cut by if nothing else is said."""

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = rf"{_SHORT}|{_WORD}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT}?|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}"
)
# Letters with case, as DeepSeek's first models list them.
_LATIN = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# By `tokenizer.ggml.pre`: rules that cut one after another what those before have left.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "default": (),
    "smollm": (r"\p{N}",),
    "llama-bpe": (rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",),
    "smaug-bpe": (rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",),
    "glm4": (rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|\p{{N}}|{_REST}",),
    "qwen35": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "tekken": (rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}",),
    "gpt-4o": (_CASED,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _CASED),
    "deepseek-llm": (
        "[\r\n]",
        rf"\s?[{_LATIN}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _PUNCTUATION
        + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "bloom": (_SENTENCES,),
    "viking": (_SENTENCES, r"\p{N}"),
    "seed-coder": (rf"{_CONTRACTIONS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
}
SAME_AS = {
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
    "modern-bert": "gpt-2",
    "exaone4": "gpt-2",
    "jais": "gpt-2",
    "trillion": "gpt-2",
    "granite-docling": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "minerva-7b": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "pixtral": "llama-bpe",
    "lfm2": "llama-bpe",
    "dbrx": "smaug-bpe",
    "chatglm-bpe": "smaug-bpe",
    "glm5": "glm4",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "megrez": "qwen2",
    "llama4": "gpt-4o",
    "kanana2": "gpt-4o",
    "hunyuan-dense": "deepseek-v3",
    "joyai-llm": "deepseek-v3",
    "poro-chat": "bloom",
    "gpt3-finnish": "bloom",
}
# These take a word that is in the vocabulary whole.
WHOLE_WORDS = {"llama-bpe", "tekken", "glm4"}
# These begin with BOS unless told otherwise.
BEGIN = {"llama-bpe", "tekken"}
# These cut by GPT-2's rule what their own has left.
AND_GPT2 = {"gpt-2", "default", "smollm"}
# These compose characters first.
COMPOSED = {"qwen2", "deepseek-r1-qwen"}


def rule_of(tokenizer: Mapping[str, Any]) -> str | None:
    """GGUF's name for the way a tokenizer.json cuts text; None if it has none here."""
    steps = tokenizer.get("pre_tokenizer") or {}
    *before, last = steps.get("pretokenizers", [steps])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    patterns = tuple(_pattern(step) for step in before)
    found = patterns, last.get("use_regex", True), bool(tokenizer["model"].get("ignore_merges"))
    known = {(SPLITS[r], r in AND_GPT2, r in WHOLE_WORDS): r for r in reversed(SPLITS)}
    return known.get(found)  # pyright: ignore[reportArgumentType]


def _pattern(step: Mapping[str, Any]) -> str | None:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else None
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step.get("invert"):
        return None
    return step["pattern"].get("Regex")
