"""Examples in rows of one length, and rows in batches: a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from flaxen.layers.cross_entropy import IGNORED
from flaxen.train.data.records import Example

LOOK_BACK = 64
"""How many unfilled rows are tried before a new one is begun."""


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` things, the same on every machine and with every NumPy."""
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(draws, kind="stable")


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Rows of whole examples, by their number: each goes to the first of the last 64 open rows
    where it fits.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    unfilled: list[int] = []
    for i, length in enumerate(lengths):
        row = next((r for r in unfilled if room[r] >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(seq_len)
            unfilled = [*unfilled, row][-LOOK_BACK:]
        rows[row].append(i)
        room[row] -= length
        if room[row] < 2:
            unfilled.remove(row)
    return rows


@dataclasses.dataclass(frozen=True)
class Batches:
    """All batches of a run: `batch_at(step)` for any step, in any order.

    Every epoch has the same rows in an order of its own; its last batch is filled up with empty
    rows.
    """

    examples: Sequence[Example]
    rows: Sequence[Sequence[int]]
    seq_len: int
    batch_size: int
    accumulation: int
    seed: int
    packed: bool

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return -(-len(self.rows) // (self.batch_size * self.accumulation))

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """ids, targets (at the slot that predicts them) and, if packed, positions and segments:
        int32 (accumulation, B, T).
        """
        epoch, within = divmod(step, self.per_epoch)
        size = self.batch_size * self.accumulation
        chosen = order(self.seed, epoch, len(self.rows))[within * size : (within + 1) * size]
        batch = blank(size, self.seq_len, self.packed)
        for i, row in enumerate(chosen):
            fill({key: array[i] for key, array in batch.items()}, self._row(row))
        shape = (self.accumulation, self.batch_size, self.seq_len)
        return {key: array.reshape(shape) for key, array in batch.items()}

    def _row(self, row: int) -> list[Example]:
        return [self.examples[i] for i in self.rows[row]]

    def fingerprint(self) -> str:
        """A hash of every token, label and row."""
        digest = hashlib.sha256()
        for row in range(len(self.rows)):
            for example in self._row(row):
                digest.update(example.ids.tobytes() + example.labels.tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:16]


def blank(rows: int, seq_len: int, packed: bool) -> dict[str, np.ndarray]:
    """Rows without any document."""
    keys = ("ids", "targets", "positions", "segments") if packed else ("ids", "targets")
    batch = {key: np.zeros((rows, seq_len), np.int32) for key in keys}
    batch["targets"][:] = IGNORED
    return batch


def fill(row: dict[str, np.ndarray], examples: Sequence[Example]) -> None:
    """Write documents one after another into one row; each counts its own positions and predicts
    nothing of the next.

    What is a target comes from the examples' true lengths, never from comparing ids with the
    padding.
    """
    at = 0
    for number, example in enumerate(examples, 1):
        stop = at + len(example.ids)
        row["ids"][at:stop] = example.ids
        row["targets"][at : stop - 1] = example.labels[1:]
        if "segments" in row:
            row["segments"][at:stop] = number
            row["positions"][at:stop] = np.arange(stop - at)
        at = stop


def make_batches(
    examples: Sequence[Example],
    *,
    seq_len: int,
    batch_size: int,
    accumulation: int = 1,
    seed: int = 0,
    packing: bool = True,
) -> Batches:
    """Batches of these examples; with packing, several short ones share a row."""
    start = [examples[i] for i in order(seed, 0, len(examples))] if packing else list(examples)
    lengths = [len(e.ids) for e in start]
    rows = pack(lengths, seq_len) if packing else [[i] for i in range(len(start))]
    packed = any(len(row) > 1 for row in rows)
    return Batches(start, rows, seq_len, batch_size, accumulation, seed, packed)
