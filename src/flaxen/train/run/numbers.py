"""Data in numbers before it is learned from: how long it is, how full rows become, which labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.progress import Progress, reporting
from flaxen.train.data.answers import answered, both_answers, prompt_tokens
from flaxen.train.data.encoding import of
from flaxen.train.data.examples import cut
from flaxen.train.data.kinds import kind_of, negatives
from flaxen.train.data.packing import pack
from flaxen.train.data.records import Record, Records
from flaxen.train.data.tokens import tokens_of


class Sizes(NamedTuple):
    """Of one record: tokens of its parts by name, tokens of each row that is made of it, and its
    label, if it has one.
    """

    parts: dict[str, list[int]]
    rows: list[int]
    label: Any = None


def _preference(tok: Any, record: Record) -> Sizes:
    chosen, rejected = both_answers(tok, record)
    parts = {"prompt": chosen.prompt, "chosen": chosen.answer, "rejected": rejected.answer}
    rows = [len(side.prompt) + len(side.answer) for side in (chosen, rejected)]
    return Sizes({name: [len(ids)] for name, ids in parts.items()}, rows)


def _judged(tok: Any, record: Record) -> Sizes:
    fields = record.fields
    with of(record):
        found = answered(tok, fields["prompt"], fields["completion"])
    parts = {"prompt": [len(found.prompt)], "completion": [len(found.answer)]}
    return Sizes(parts, [len(found.prompt) + len(found.answer)], fields["label"])


def _asked(tok: Any, record: Record) -> Sizes:
    fields = record.fields
    prompt = fields["prompt"] if "prompt" in fields else fields["messages"]
    with of(record):
        count = len(prompt_tokens(tok, prompt, fields.get("tools")))
    return Sizes({"prompt": [count]}, [count])


def _text(tok: Any, record: Record) -> Sizes:
    count = _tokens(tok, record.fields["text"])
    return Sizes({"text": [count]}, [count], record.fields.get("label"))


def _pair(tok: Any, record: Record) -> Sizes:
    fields = record.fields
    texts = {"query": [fields["query"] if "query" in fields else fields["anchor"]]}
    texts |= {"positive": [fields["positive"]], "negative": negatives(fields)}
    parts = {name: [_tokens(tok, text) for text in each] for name, each in texts.items()}
    return Sizes(parts, [count for each in parts.values() for count in each])


def _tokens(tok: Any, text: str) -> int:
    return len(tok(text, verbose=False)["input_ids"])


SIZES: dict[str, Callable[[Any, Record], Sizes]] = {
    "preference": _preference,
    "judged": _judged,
    "prompt": _asked,
    "conversation": _asked,
    "text": _text,
    "labelled": _text,
    "pair": _pair,
}
"""By kind of record, of `data.kinds.KINDS`."""


def sizes(
    tok: Any, records: Records, *, seq_len: int, progress: Progress = False
) -> dict[str, Any]:
    """Of records that become rows of their own: how long their parts are, how many rows are longer
    than `seq_len`, how often each label comes.

    Raises:
        InputError: bad records.
    """
    parts: dict[str, list[int]] = {}
    rows: list[int] = []
    labels: Counter[Any] = Counter()
    with reporting(progress, "tokenising", len(records), unit="records") as report:
        for record in records:
            found = _measured(tok, record, records.kinds)
            for name, counts in found.parts.items():
                parts.setdefault(name, []).extend(counts)
            rows += found.rows
            labels.update([] if found.label is None else [found.label])
            if report is not None:
                report(1)
    lengths = np.array(rows)
    return {
        "records": len(records),
        "lengths": {name: extent(np.array(counts)) for name, counts in parts.items() if counts},
        "labels": {str(label).lower(): labels[label] for label in sorted(labels)},
        "histogram": histogram(lengths),
        "seq_len": seq_len,
        "rows": len(rows),
        "overlong": int((lengths > seq_len).sum()),
    }


def _measured(tok: Any, record: Record, kinds: Sequence[str]) -> Sizes:
    kind = kind_of(record.fields, kinds)
    if kind not in SIZES:
        raise InputError(f"{record.where}: of records of this kind there are no statistics.")
    return SIZES[kind](tok, record)


def extent(lengths: np.ndarray) -> dict[str, float]:
    """Least, median, mean and greatest."""
    return {
        "least": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "most": int(lengths.max()),
    }


def histogram(lengths: np.ndarray) -> dict[int, int]:
    """How many lengths are up to 1, 2, 4, ..., from the first power of two that has any to the
    last.
    """
    edges = 2 ** np.arange(int(max(lengths.max(), 2) - 1).bit_length() + 1)
    counts = np.histogram(lengths, np.concatenate([[0], edges + 1]))[0]
    there = np.flatnonzero(counts)
    kept = range(there[0], there[-1] + 1)
    return {int(edges[i]): int(counts[i]) for i in kept}


def statistics(
    tok: Any,
    records: Records,
    *,
    seq_len: int,
    train_on: str = "assistant",
    cache: str = "none",
    progress: Progress = False,
) -> dict[str, Any]:
    """Documents, tokens, how many are learned, how long documents are, and how full rows become.

    Raises:
        InputError: bad records.
    """
    tokens = tokens_of(tok, records, train_on=train_on, cache=cache, progress=progress)
    lengths = np.diff(tokens.bounds)
    examples = cut(tokens, seq_len)
    rows = pack(examples.lengths, seq_len) if len(examples) else []
    kept = int(examples.lengths.sum())
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "learned": int(np.count_nonzero(tokens.learned)),
        "lengths": extent(lengths),
        "histogram": histogram(lengths),
        "seq_len": seq_len,
        "examples": len(examples),
        "overlong": examples.overlong,
        "rows_packed": len(rows),
        "full_packed": kept / (len(rows) * seq_len) if rows else 0.0,
        "full_padded": kept / (len(examples) * seq_len) if rows else 0.0,
    }
