"""Text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxen.convert.formats.hub import download
from flaxen.convert.formats.hub_files import tokenizer_files
from flaxen.core.errors import CheckpointError, InputError
from flaxen.core.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Span = tuple[int, int]

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Of a folder without any of these, transformers makes a tokenizer of no words."""


def tokenizer(
    path: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder, a hub id or a `.gguf` file.

    A hub id may go on with a folder or a file, and then `revision` (branch, tag or commit) and
    `token` count; only the tokenizer's files are downloaded.

    Code that comes with a checkpoint is never run.
    Raises CheckpointError where no tokenizer can be made.
    """
    here = Path(path).expanduser()
    if not here.exists():
        here = download(os.fspath(path), revision=revision, token=token, choose=tokenizer_files)
    elif here.is_dir() and not any((here / name).is_file() for name in VOCABULARIES):
        raise CheckpointError(
            f"{here} holds no tokenizer: none of {', '.join(VOCABULARIES)} is there."
        )
    hf = transformers()
    if here.suffix == ".gguf":
        from flaxen.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(here)
    where = os.fspath(here)
    try:
        found = hf.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # each kind of damaged file raises another kind
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"No tokenizer can be made of {where!r}: {why} "
            "What is looked for is a tokenizer.json, with its tokenizer_config.json."
        ) from error
    if not isinstance(found, hf.PreTrainedTokenizerFast):
        raise CheckpointError(
            f"{where!r} has a {type(found).__name__}, which has no tokenizer.json form. "
            "Convert it with transformers and save it again."
        )
    return found


def tokenized(tok: PreTrainedTokenizerFast, text: str, **how: Any) -> Any:
    """What a tokenizer makes of a text.

    Raises:
        InputError: for what is no text, or has halves of characters, as bytes that are not UTF-8
        become on the command line.
    """
    try:
        return tok(text, verbose=False, **how)
    except TypeError as error:
        if not isinstance(text, str):
            raise InputError(f"The text is a {type(text).__name__}; expected a string.") from error
        half = next((x for x in text if "\ud800" <= x <= "\udfff"), None)
        if half is None:
            raise
        at = text.index(half)
        raise InputError(
            f"The text has {half!r} at character {at}, which is half of one; expected text in "
            "UTF-8."
        ) from error


def encode(tok: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a text, with the tokenizer's own special tokens, but never a second BOS."""
    return encode_with_offsets(tok, text)[0]


def encode_all(
    tok: PreTrainedTokenizerFast, texts: Sequence[str], special_tokens: bool = True
) -> list[list[int]]:
    """`encode` of many texts, on all cores. special_tokens: whether the tokenizer adds its own."""
    if not texts:
        return []
    found = tok(list(texts), add_special_tokens=special_tokens, verbose=False)["input_ids"]
    bos = tok.bos_token_id
    # Whose the second BOS is, only the offsets tell.
    twice = lambda ids: special_tokens and bos is not None and ids[:2] == [bos, bos]
    return [
        encode(tok, text) if twice(ids) else ids for text, ids in zip(texts, found, strict=True)
    ]


def encode_with_offsets(tok: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[Span]]:
    """`encode`, and the (start, stop) characters of each token; (0, 0) for those added."""
    # Called like this, a length limit or padding in tokenizer.json has no effect.
    encoding = tokenized(tok, text, return_offsets_mapping=True)
    return _one_bos(tok, encoding["input_ids"], encoding["offset_mapping"])


def encode_all_with_offsets(
    tok: PreTrainedTokenizerFast, texts: Sequence[str]
) -> list[tuple[list[int], list[Span]]]:
    """`encode_with_offsets` of many texts, on all cores."""
    if not texts:
        return []
    found = tok(list(texts), return_offsets_mapping=True, verbose=False)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [_one_bos(tok, ids, offsets) for ids, offsets in pairs]


def _one_bos(
    tok: PreTrainedTokenizerFast, ids: list[int], offsets: list[Span]
) -> tuple[list[int], list[Span]]:
    bos = tok.bos_token_id
    if bos is not None and ids[:2] == [bos, bos] and offsets[0] == (0, 0) != offsets[1]:
        return ids[1:], offsets[1:]
    return ids, offsets


def decode(tok: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of token ids, without special tokens and exactly as the model spaced it."""
    return tok.backend_tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)
