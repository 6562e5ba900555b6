"""The tokenizer's part of a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from flaxen.convert.formats.gguf_cuts import BEGIN, COMPOSED, SAME_AS
from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.core.errors import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6

KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "gemma4": "BPE of characters",
    "bert": "WordPiece",
}

_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103},
}
"""Where special tokens are if nothing says so."""


class Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, file: GgufFile):
        self.path, self.metadata = file.path, file.metadata
        self.model = self.get("model")
        if self.model not in KINDS:
            known = ", ".join(f"{kind!r} ({what})" for kind, what in KINDS.items())
            raise CheckpointError(
                f"{self.path}: its tokenizer is of kind {self.model!r}; {known} can be rebuilt. "
                "Use a folder with tokenizer.json."
            )
        self.tokens: list[str] = self.get("tokens")
        if not isinstance(self.tokens, list) or not self.tokens:
            raise CheckpointError(f"{self.path}: it holds no list of tokens.")
        kinds = self.get("token_type")
        self.kinds: list[int] = [1] * len(self.tokens) if kinds is None else list(map(int, kinds))
        scores = self.get("scores")
        self.scores: list[float] = [] if scores is None else list(map(float, scores))
        for what, values in (("types", self.kinds), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise CheckpointError(
                    f"{self.path}: {len(self.tokens)} tokens but {len(values)} token {what}."
                )
        self.ids = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        rule = str(self.get("pre", "default"))
        self.split, self.composed = SAME_AS.get(rule, rule), rule in COMPOSED

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def special(self, name: str) -> str | None:
        usual = _IDS.get(self.model, {}).get(name, len(self.tokens))
        index = self.get(f"{name}_token_id", usual if usual < len(self.tokens) else None)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"{self.path}: its {name} token is {index}, past its {len(self.tokens)} tokens."
            )
        return self.tokens[index]

    def adds(self, name: str) -> bool:
        begins = self.model in ("llama", "gemma4") or self.split in BEGIN
        habit = name == "bos" and begins
        return bool(self.get(f"add_{name}_token", habit)) and self.special(name) is not None
