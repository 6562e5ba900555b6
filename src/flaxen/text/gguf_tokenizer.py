"""The tokenizer a GGUF file carries, rebuilt as a Hugging Face one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flaxen.convert.formats.gguf_cuts import AND_GPT2, SAME_AS, SPLITS, WHOLE_WORDS
from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.convert.formats.gguf_parts import read_parts
from flaxen.core.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from tokenizers import AddedToken, Regex, Tokenizer
    from transformers import PreTrainedTokenizerFast

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6

SPACE = "▁"


def gguf_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Ids, special tokens, BOS/EOS habits and the chat template are the file's; `save_pretrained`
    writes it as a Hugging Face folder. Raises CheckpointError for a vocabulary of another kind.
    """
    from transformers import PreTrainedTokenizerFast

    file = read_parts(path)
    words = _Vocabulary(file)
    backend = _byte_level(words) if words.model == "gpt2" else _sentencepiece(words)
    backend.add_tokens(list(_added(words)))
    named = {name: words.special(key) for name, key in _NAMED.items()}
    length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=words.adds("bos"),
        add_eos_token=words.adds("eos"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **({"model_max_length": length} if length else {}),
        **{name: token for name, token in named.items() if token is not None},
    )


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


class _Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, file: GgufFile):
        self.path, self.metadata = file.path, file.metadata
        self.model = self.get("model")
        if self.model not in ("gpt2", "llama"):
            raise CheckpointError(
                f"{self.path}: its tokenizer is of kind {self.model!r}; 'gpt2' (byte-level BPE) "
                "and 'llama' (SentencePiece BPE) can be rebuilt. Use a folder with tokenizer.json."
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
        self.split = SAME_AS.get(rule, rule)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def special(self, name: str) -> str | None:
        default = _SENTENCEPIECE_IDS.get(name) if self.model == "llama" else None
        index = self.get(f"{name}_token_id", default)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"{self.path}: its {name} token is {index}, past its {len(self.tokens)} tokens."
            )
        return self.tokens[index]

    def adds(self, name: str) -> bool:
        habit = name == "bos" and (self.model == "llama" or self.split in WHOLE_WORDS)
        return bool(self.get(f"add_{name}_token", habit)) and self.special(name) is not None


def _byte_level(words: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if words.split not in SPLITS:
        raise CheckpointError(
            f"{words.path}: it cuts text by the rule {words.split!r}, which is not known here."
            f"{did_you_mean(words.split, [*SPLITS, *SAME_AS])}"
        )
    merges = [tuple(line.split(" ", 1)) for line in words.get("merges", [])]
    backend = Tokenizer(
        models.BPE(words.ids, merges, ignore_merges=words.split in WHOLE_WORDS)  # pyright: ignore
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(_cuts(words.split, Regex))
    backend.decoder = decoders.ByteLevel()
    if words.split == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _cuts(rule: str, regex: type[Regex]) -> list[Any]:
    from tokenizers.pre_tokenizers import ByteLevel, Split

    pattern = SPLITS[rule]
    if pattern is None:
        return [ByteLevel(add_prefix_space=False, use_regex=True)]
    return [
        Split(regex(pattern), behavior="isolated"),
        ByteLevel(add_prefix_space=False, use_regex=rule in AND_GPT2),
    ]


def _sentencepiece(words: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if not words.scores:
        raise CheckpointError(f"{words.path}: a SentencePiece vocabulary without scores.")
    backend = Tokenizer(
        models.BPE(
            words.ids,
            list(_merges(words)),
            unk_token=words.special("unknown"),
            fuse_unk=True,
            byte_fallback=BYTE in words.kinds,
        )
    )
    prefix = bool(words.get("add_space_prefix", True))
    before = [normalizers.Prepend(SPACE)] if prefix else []
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _merges(words: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Pairs in the order in which SentencePiece would join them: the best-scored result first."""
    apart = {UNKNOWN, CONTROL, UNUSED, BYTE}
    order = sorted(
        (i for i, kind in enumerate(words.kinds) if kind not in apart),
        key=lambda i: -words.scores[i],
    )
    for i in order:
        piece = words.tokens[i]
        # Of several ways to one piece the longest left part goes first, as in Hugging Face files.
        for cut in range(len(piece) - 1, 0, -1):
            if piece[:cut] in words.ids and piece[cut:] in words.ids:
                yield piece[:cut], piece[cut:]


def _added(words: _Vocabulary) -> Iterator[AddedToken]:
    """Tokens looked for in a text before it is cut: control tokens, and those a user defined."""
    from tokenizers import AddedToken

    for token, kind in zip(words.tokens, words.kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            yield AddedToken(token, normalized=False, special=kind == CONTROL)
