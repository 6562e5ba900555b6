"""Rows of examples in batches: any step, in any order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxen.train.data.examples import Example, Examples
from flaxen.train.data.order import ByLength, Order, permutation
from flaxen.train.data.packing import filled_batch, pack

WIDTHS = 8
"""How many lengths batches have that are no longer than they must be: each is compiled once."""


class Rows(Sequence[Sequence[Example]]):
    """Rows of examples; of row i they are `members[bounds[i]:bounds[i + 1]]`."""

    def __init__(
        self, examples: Sequence[Example], rows: Sequence[Sequence[int] | np.ndarray] | None = None
    ):
        """rows: which examples each has; None: each has one."""
        count = len(examples)
        self.examples = examples
        if rows is None:
            self.members, self.bounds = np.arange(count), np.arange(count + 1)
        else:
            self.members = np.fromiter((i for row in rows for i in row), np.int64, count)
            self.bounds = np.cumsum([0, *map(len, rows)])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: Any) -> Any:
        return [self.examples[i] for i in self.members[self.bounds[row] : self.bounds[row + 1]]]

    @property
    def packed(self) -> bool:
        """Whether any row has several."""
        return len(self.members) > len(self)

    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.add.reduceat(lengths_of(self.examples)[self.members], self.bounds[:-1])

    def fingerprint(self) -> str:
        """A hash of every token, label and row."""
        digest = hashlib.sha256(self.members.tobytes() + self.bounds.tobytes())
        if isinstance(self.examples, Examples):
            digest.update(self.examples.fingerprint().encode())
        else:
            for example in self.examples:
                digest.update(example.ids.tobytes() + example.labels.tobytes() + b"|")
        return digest.hexdigest()[:16]


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """Tokens of each example."""
    if isinstance(examples, Examples):
        return examples.lengths
    return np.asarray([len(example.ids) for example in examples], np.int64)


@dataclasses.dataclass(frozen=True)
class Batches:
    """All batches of a run: `batch_at(step)` for any step, in any order.

    parts: rows that are mixed by `weights`, or one part without. Every epoch has the same rows in
    an order of its own; what its last batch lacks are empty rows. by_length: rows of a batch are
    about equally long, and the batch hardly longer than they.
    """

    parts: tuple[Rows, ...]
    seq_len: int
    batch_size: int
    accumulation: int
    seed: int
    weights: tuple[float, ...] | None = None
    by_length: bool = False
    order: Order | ByLength = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        counts = tuple(map(len, self.parts))
        size = self.batch_size * self.accumulation
        order: Order | ByLength = Order(counts, self.seed, size, self.weights)
        if self.by_length:
            order = ByLength(order, np.concatenate([part.lengths() for part in self.parts]))
        object.__setattr__(self, "order", order)

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return self.order.per_epoch

    @property
    def count(self) -> int:
        """Examples of all parts."""
        return sum(len(part.examples) for part in self.parts)

    @property
    def packed(self) -> bool:
        return any(part.packed for part in self.parts)

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """ids, targets (at the slot that predicts them) and, if packed, positions and segments:
        int32 (accumulation, B, T).
        """
        rows = [self._row(number) for number in self.order.rows(step)]
        width = self.seq_len
        if self.by_length:
            width = rounded(max(sum(len(e.ids) for e in row) for row in rows), self.seq_len)
        return filled_batch(rows, (self.accumulation, self.batch_size), width, self.packed)

    def _row(self, number: int) -> Sequence[Example]:
        for part in self.parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)

    def mixed(self, others: Sequence[Batches], weights: Sequence[float]) -> Batches:
        """One source of this and others, by weight."""
        parts = [part for source in (self, *others) for part in source.parts]
        return dataclasses.replace(self, parts=tuple(parts), weights=tuple(weights))

    def fingerprint(self) -> str:
        """A hash of every token, label and row, and of their order."""
        found = [*(part.fingerprint() for part in self.parts), self.order.probe()]
        found += [repr((self.weights, self.by_length))]
        return hashlib.sha256(" ".join(found).encode()).hexdigest()[:16]


def rounded(length: int, seq_len: int) -> int:
    """A length of one of `WIDTHS` multiples that is enough, at most `seq_len`."""
    grain = -(-seq_len // WIDTHS)
    grain = -(-grain // 16) * 16 if grain >= 16 else grain
    return min(-(-length // grain) * grain, seq_len)


def make_batches(
    examples: Sequence[Example],
    *,
    seq_len: int,
    batch_size: int,
    accumulation: int = 1,
    seed: int = 0,
    packing: bool = True,
    by_length: bool = False,
) -> Batches:
    """Batches of these examples; with packing, several short ones share a row."""
    rows = None
    if packing:
        # Neighbours of a file are often alike: they would share rows in every epoch.
        order = permutation(seed, 0, len(examples))
        rows = [order[row] for row in pack(lengths_of(examples)[order], seq_len)]
    parts = (Rows(examples, rows),)
    return Batches(parts, seq_len, batch_size, accumulation, seed, by_length=by_length)
