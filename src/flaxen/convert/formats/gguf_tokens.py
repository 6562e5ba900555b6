"""The tokenizer of a Hugging Face folder as GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.convert.formats.gguf_cuts import rule_of
from flaxen.core.errors import CheckpointError
from flaxen.core.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
FIXED = -1000.0
"""The score of a token that no merging makes."""

_BYTES = {f"<0x{i:02X}>" for i in range(256)}
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_metadata(folder: Path, size: int, rule: str | None = None) -> dict[str, Any]:
    """The `tokenizer.*` keys for the tokenizer in a folder and a vocabulary of `size` rows.

    Byte-level BPE becomes `gpt2` with the name of its cutting rule (`tokenizer.ggml.pre`), which
    `rule` overrides; BPE over text with ▁ for spaces becomes `llama`, with scores in the order of
    its merges. Normalisation to NFC is left out: GGUF has no word for it.

    Raises CheckpointError for a tokenizer that GGUF cannot say, or a rule that is not known.
    """
    words = _load(folder)
    about = json.loads(words.backend_tokenizer.to_str())
    if about["model"]["type"] != "BPE":
        raise CheckpointError(
            f"{folder}: its tokenizer is of kind {about['model']['type']}; only BPE can be written "
            "as GGUF."
        )
    tokens, kinds = _tokens(about, size, folder)
    byte_level = '"ByteLevel"' in json.dumps([about["pre_tokenizer"], about["decoder"]])
    own = _byte_level(about, rule, folder) if byte_level else _with_scores(about, tokens, kinds)
    said = {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        **own,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }
    return said | _special(words, size, folder) | _templates(words)


def _load(folder: Path) -> PreTrainedTokenizerFast:
    hf = transformers()
    try:
        words = hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{folder}: no tokenizer can be made of it: {why}") from error
    if not isinstance(words, hf.PreTrainedTokenizerFast):
        raise CheckpointError(
            f"{folder} has a {type(words).__name__}, which has no tokenizer.json form."
        )
    return words


def _tokens(about: Mapping[str, Any], size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Each id's token and type; ids without a token are marked unused."""
    vocabulary, added = about["model"]["vocab"], about["added_tokens"]
    if vocabulary and max(vocabulary.values()) >= size:
        raise CheckpointError(
            f"{folder}: its tokenizer has ids up to {max(vocabulary.values())}, but the model "
            f"embeds {size} tokens."
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    fallback = about["model"].get("byte_fallback")
    for token, i in vocabulary.items():
        tokens[i], kinds[i] = token, BYTE if fallback and token in _BYTES else NORMAL
        if token == about["model"].get("unk_token"):
            kinds[i] = UNKNOWN
    for entry in added:
        # A token that the model has no row for can never be fed to it.
        if (i := entry["id"]) < size:
            tokens[i] = entry["content"]
            kinds[i] = CONTROL if entry["special"] else USER_DEFINED
    return tokens, kinds


def _byte_level(about: Mapping[str, Any], rule: str | None, folder: Path) -> dict[str, Any]:
    rule = rule or rule_of(about)
    if rule is None:
        raise CheckpointError(
            f"{folder}: the way its tokenizer cuts text into words has no name known here. If "
            "llama.cpp knows it, pass that name as `pre`."
        )
    pairs = about["model"]["merges"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    return {"tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": merges}


def _with_scores(about: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Scores that make joining the best-scored pair first the same as joining by rank.

    User-defined tokens are looked for in the raw text, so their ▁ becomes a space.
    """
    merged = dict.fromkeys("".join(pair) for pair in map(_pair, about["model"]["merges"]))
    normal = {token: None for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    order = [piece for piece in merged if piece in normal]
    order += [token for token in normal if token not in merged]
    ranks = {piece: -float(i) for i, piece in enumerate(order)}
    for i, kind in enumerate(kinds):
        if kind == USER_DEFINED:
            tokens[i] = tokens[i].replace(SPACE, " ")
    scores = [
        ranks[token] if kind == NORMAL else 0.0 if kind == BYTE else FIXED
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    before = json.dumps([about["normalizer"], about["pre_tokenizer"]], ensure_ascii=False)
    prefix = any(word in before for word in ('"Prepend"', '"always"', '"first"'))
    return {
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _special(words: PreTrainedTokenizerFast, size: int, folder: Path) -> dict[str, Any]:
    """Special ids, and which of them the tokenizer puts around a text."""
    ids = {ours: getattr(words, f"{name}_token_id") for name, ours in _IDS.items()}
    said: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": i
        for name, i in ids.items()
        if i is not None and i < size
    }
    bare = words("a", add_special_tokens=False)["input_ids"]
    whole = words("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            if whole == [ids["bos"]] * bos + bare + [ids["eos"]] * eos:
                said["tokenizer.ggml.add_bos_token"] = bos
                said["tokenizer.ggml.add_eos_token"] = eos
                return said
    raise CheckpointError(
        f"{folder}: its tokenizer makes {whole} of 'a', more than BOS {ids['bos']} and EOS "
        f"{ids['eos']} around {bare}; GGUF cannot say so."
    )


def _templates(words: PreTrainedTokenizerFast) -> dict[str, Any]:
    template = words.chat_template
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = dict(template or {})
    said: dict[str, Any] = {}
    if "default" in named:
        said["tokenizer.chat_template"] = named.pop("default")
    if named:
        said["tokenizer.chat_templates"] = list(named)
    return said | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
