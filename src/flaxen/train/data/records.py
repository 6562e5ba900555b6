"""Training data: JSONL and text files, checked whole, then tokenised into examples."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.text import encode, render_with_mask
from flaxen.train.data.kinds import CAUSAL, expected, problem_of
from flaxen.train.settings import Paths

SHOWN = 5
"""How many bad lines one error lists."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One document and where it came from: `file:line`."""

    where: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Example:
    """ids and labels, int32 (n,), unshifted; a label is its id or -100."""

    ids: np.ndarray
    labels: np.ndarray


def read_records(paths: Paths, kinds: Sequence[str] = CAUSAL) -> list[Record]:
    """Every document of one or more `.jsonl` or text files; a text file is one document. kinds:
    which ones may be there, of `kinds.KINDS`.

    Raises:
        InputError: listing every bad line (the first five in full), before anything is used.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    records: list[Record] = []
    problems: list[str] = []
    for file in map(Path, files):
        for where, found in _lines(file):
            wrong = found if isinstance(found, str) else problem_of(found, kinds)
            if isinstance(found, str) or wrong is not None:
                problems.append(f"{where}: {wrong}")
            else:
                records.append(Record(where, found))
    if problems:
        more = f"\n... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InputError(
            "The training data has bad lines; expected on each: "
            + expected(kinds)
            + ".\n"
            + "\n".join(problems[:SHOWN])
            + more
        )
    if not records:
        raise InputError(f"There is no document in {', '.join(map(str, files))}.")
    return records


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(where, document or what is wrong with it) for each line that is not empty."""
    if file.suffix not in (".jsonl", ".json", ".txt", ".md"):
        raise InputError(f"{file} is neither .jsonl nor .txt; those two can be trained on.")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    if file.suffix in (".txt", ".md"):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            yield str(file), f"byte {error.start} is not UTF-8"
            return
        if text.strip():
            yield str(file), {"text": text}
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            yield f"{file}:{number}", _document(line)


def _document(line: bytes) -> dict[str, Any] | str:
    try:
        fields = json.loads(line)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except ValueError as error:
        return f"not JSON ({error})"
    if not isinstance(fields, dict):
        return f"found a {type(fields).__name__}"
    return fields


def tokenise(tok: Any, records: list[Record], seq_len: int) -> list[Example]:
    """Examples of at most `seq_len` tokens.

    A text gets the EOS at its end, as a target too; a longer one becomes several examples, each
    starting with the last token of the one before, so that every token is predicted once. A chat
    counts only what the assistant wrote, a completion only itself and its EOS; those two are cut at
    `seq_len`, and left out if nothing is left to predict.

    Raises:
        InputError: for a chat that the template refuses, with its file and line; when no example
            has a target.
    """
    examples: list[Example] = []
    for record in records:
        try:
            ids, labels = _tokens(tok, record.fields)
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from error
        if "text" in record.fields:
            stops = range(0, max(len(ids) - 1, 1), seq_len - 1)
            pieces = [slice(i, i + seq_len) for i in stops]
        else:
            pieces = [slice(0, seq_len)]
        examples += [Example(ids[piece], labels[piece]) for piece in pieces]
    # The first label of an example has nothing before it that could predict it.
    useful = [e for e in examples if (e.labels[1:] != IGNORED).any()]
    if not useful:
        raise InputError(
            f"None of the {len(examples)} examples has a target within seq_len={seq_len} tokens. "
            "Use a longer seq_len, or look at what the chat template renders."
        )
    return useful


def _tokens(tok: Any, fields: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if "messages" in fields:
        ids, mask = render_with_mask(tok, fields["messages"], tools=fields.get("tools"))
    elif "text" in fields:
        ids = _ended(tok, encode(tok, fields["text"]))
        mask = [1] * len(ids)
    else:
        prompt, answer = prompt_and_answer(tok, fields["prompt"], fields["completion"])
        ids = prompt + answer
        mask = [0] * len(prompt) + [1] * len(answer)
    tokens = np.asarray(ids, np.int32)
    return tokens, np.where(np.asarray(mask, bool), tokens, IGNORED).astype(np.int32)


def prompt_and_answer(tok: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of both; the answer with its EOS."""
    before = _unended(tok, encode(tok, prompt))
    return before, _ended(tok, tok(answer, add_special_tokens=False, verbose=False)["input_ids"])


def _ended(tok: Any, ids: list[int]) -> list[int]:
    """With exactly one EOS at the end; a tokenizer without one leaves the text open."""
    eos = tok.eos_token_id
    return list(ids) if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _unended(tok: Any, ids: list[int]) -> list[int]:
    """Without the EOS that some tokenizers put after any text."""
    return ids[:-1] if tok.eos_token_id is not None and ids[-1:] == [tok.eos_token_id] else ids
