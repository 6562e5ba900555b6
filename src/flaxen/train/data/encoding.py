"""Records as token ids, and which of them are learned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxen.core.errors import InputError
from flaxen.text import (
    encode_all,
    encode_all_rendered,
    encode_all_with_offsets,
    learned_tokens,
    render_with_spans,
    tokens_in,
)
from flaxen.train.data.records import Record

TOGETHER = 512
"""Records that are encoded together, on all cores."""
CHARACTERS = 1 << 22
"""Of which no more are encoded together, if one record has not that many."""


class Document(NamedTuple):
    """ids, learned: (n,); splits: whether a row may begin in the middle of it."""

    ids: Sequence[int]
    learned: np.ndarray
    splits: bool


def encoded(tok: Any, records: Iterable[Record], train_on: str = "assistant") -> Iterator[Document]:
    """A text gets the EOS at its end, as a target too; `spans`, if it has them, are what is learned
    of it. Of a chat that is what `train_on` says, of a completion only itself and its EOS.

    Raises:
        InputError: for a chat that the template refuses, with its file and line.
    """
    for together in _together(records):
        found: list[Document | None] = [None] * len(together)
        for key, encode in ENCODERS.items():
            at = [i for i, record in enumerate(together) if _form(record) == key]
            these = [together[i] for i in at]
            for i, document in zip(at, encode(tok, these, train_on), strict=True):
                found[i] = document
        yield from (document for document in found if document is not None)


def _together(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += sum(len(x) for x in record.fields.values() if isinstance(x, str))
        if len(batch) == TOGETHER or size >= CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _form(record: Record) -> str:
    fields = record.fields
    return next(key for key in ENCODERS if key in fields)


def _chats(tok: Any, records: Sequence[Record], train_on: str) -> Iterator[Document]:
    written = []
    for record in records:
        with of(record):
            fields = record.fields
            written.append(
                render_with_spans(
                    tok, fields["messages"], tools=fields.get("tools"), train_on=train_on
                )
            )
    found = encode_all_rendered(tok, [text for text, _ in written])
    for record, (_, spans), (ids, offsets) in zip(records, written, found, strict=True):
        with of(record):
            yield Document(ids, learned_tokens(offsets, spans), False)


def _marked_texts(tok: Any, records: Sequence[Record], _: str) -> Iterator[Document]:
    texts = [record.fields["text"] for record in records]
    for record, (ids, offsets) in zip(records, encode_all_with_offsets(tok, texts), strict=True):
        spans = record.fields["spans"]
        learned = tokens_in(offsets, [(start, stop) for start, stop in spans])
        if not learned.any():
            raise InputError(f"{record.where}: no token lies in 'spans'.")
        ids = ended(tok, ids)
        if ids[-1] == tok.eos_token_id:
            to_the_end = max(stop for _, stop in spans) == len(record.fields["text"])
            learned = np.append(learned[: len(ids) - 1], to_the_end)
        yield Document(ids, learned, True)


def _texts(tok: Any, records: Sequence[Record], _: str) -> Iterator[Document]:
    for ids in encode_all(tok, [record.fields["text"] for record in records]):
        ids = ended(tok, ids)
        yield Document(ids, np.ones(len(ids), bool), True)


def _completions(tok: Any, records: Sequence[Record], _: str) -> Iterator[Document]:
    prompts = [record.fields["prompt"] for record in records]
    answers = [record.fields["completion"] for record in records]
    for before, after in prompts_and_answers(tok, prompts, answers):
        yield Document(before + after, np.arange(len(before + after)) >= len(before), False)


ENCODERS = {"messages": _chats, "prompt": _completions, "spans": _marked_texts, "text": _texts}
"""By the key that a record has, the first of these."""


@contextlib.contextmanager
def of(record: Record) -> Iterator[None]:
    """Errors tell where the record is."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{record.where}: {error}") from error


def prompts_and_answers(
    tok: Any, prompts: Sequence[str], answers: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of both of each; an answer with its EOS."""
    found = encode_all(tok, prompts), encode_all(tok, answers, special_tokens=False)
    for before, after in zip(*found, strict=True):
        yield _unended(tok, before), ended(tok, after)


def prompt_and_answer(tok: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of both; the answer with its EOS."""
    return next(prompts_and_answers(tok, [prompt], [answer]))


def ended(tok: Any, ids: list[int]) -> list[int]:
    """With exactly one EOS at the end; a tokenizer without one leaves the text open."""
    eos = tok.eos_token_id
    return list(ids) if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _unended(tok: Any, ids: list[int]) -> list[int]:
    """Without the EOS that some tokenizers put after any text."""
    return ids[:-1] if tok.eos_token_id is not None and ids[-1:] == [tok.eos_token_id] else ids
