"""The backend of a tokenizer that is described in a GGUF file, for each kind of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flaxen.convert.formats.gguf_cuts import AND_GPT2, SAME_AS, SPLITS, WHOLE_WORDS
from flaxen.core.errors import CheckpointError, did_you_mean
from flaxen.text.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Regex, Tokenizer

SPACE = "▁"


def _byte_level(words: Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if words.split not in SPLITS:
        raise CheckpointError(
            f"{words.path}: it cuts text by the rule {words.split!r}, which is not known here."
            f"{did_you_mean(words.split, [*SPLITS, *SAME_AS])}"
        )
    whole = words.split in WHOLE_WORDS
    backend = Tokenizer(models.BPE(words.ids, _pairs(words), ignore_merges=whole))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_cuts(words.split, Regex))
    backend.decoder = decoders.ByteLevel()
    if words.composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _pairs(words: Vocabulary) -> list[tuple[str, str]]:
    """Pairs to join, the first ones first. A piece may begin with a space."""
    lines: list[str] = words.get("merges", [])
    cuts = (line.index(" ", 1) for line in lines)
    return [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]


def _cuts(rule: str, regex: type[Regex]) -> list[Any]:
    from tokenizers.pre_tokenizers import ByteLevel, Split

    cuts = [Split(regex(pattern), behavior="isolated") for pattern in SPLITS[rule]]
    return [*cuts, ByteLevel(add_prefix_space=False, use_regex=rule in AND_GPT2)]


def _sentencepiece(words: Vocabulary) -> Tokenizer:
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


def _merges(words: Vocabulary) -> Iterator[tuple[str, str]]:
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


def _of_characters(words: Vocabulary) -> Tokenizer:
    """BPE over the characters of whole lines (Gemma 4)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    bytes_too = any(token == "<0x00>" for token in words.tokens)
    backend = Tokenizer(
        models.BPE(
            words.ids,
            _pairs(words),
            unk_token=words.special("unknown"),
            fuse_unk=True,
            byte_fallback=bytes_too,
            ignore_merges=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _wordpiece(words: Vocabulary) -> Tokenizer:
    """BERT's: the file marks pieces that begin a word, the model those that do not."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    plain = {CONTROL, UNKNOWN, UNUSED}
    pieces: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True)):
        inside = not token.startswith(SPACE)
        bracketed = token.startswith("[") and token.endswith("]") and len(token) > 2
        as_it_is = kind in plain or bracketed
        piece = token if as_it_is else f"##{token}" if inside else token.removeprefix(SPACE)
        pieces.setdefault(piece, i)
    unknown = words.special("unknown")
    backend = Tokenizer(models.WordPiece(pieces, unk_token=str(unknown)))
    lower = bool(words.get("normalizer.lowercase", True))
    accents = bool(words.get("normalizer.strip_accents", lower))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    first, last = words.special("bos"), words.special("seperator")
    if first is not None and last is not None:
        backend.post_processor = processors.BertProcessing(
            (last, words.ids[last]), (first, words.ids[first])
        )
    return backend


BACKENDS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _of_characters,
    "bert": _wordpiece,
}
"""By `tokenizer.ggml.model`."""
