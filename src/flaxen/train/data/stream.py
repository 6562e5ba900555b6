"""Data that is read while a run goes on, for what fits neither into memory nor onto the disk."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.train.data.encoding import encoded
from flaxen.train.data.examples import Example, cut, tell_overlong
from flaxen.train.data.order import Turns
from flaxen.train.data.packing import filled_batch, packed
from flaxen.train.data.parts import Part, weights_of
from flaxen.train.data.records import Record, found_in, size_of
from flaxen.train.data.tokens import fingerprint, in_memory

TOGETHER = 256
"""Documents that are cut together."""


class Stream:
    """All batches of a run, read as they are asked for: a pure function of data, settings and step,
    quick for the step after the last. For another one the stream is read again from its beginning.

    An epoch is the whole run. A part that ends begins anew, in another order. Of a mixture the rows
    take turns.
    """

    def __init__(
        self,
        tok: Any,
        parts: tuple[Part, ...],
        config: Any,
        accumulation: int,
        kinds: Sequence[str],
    ):
        """config: settings of training, with `steps`."""
        self.tok, self.parts, self.config, self.kinds = tok, parts, config, tuple(kinds)
        self.shape = (accumulation, config.batch_size)
        self._rows: Iterator[list[Example]] = iter(())
        self._next = -1
        self._told = False

    @property
    def per_epoch(self) -> int:
        return self.config.steps

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """As `Batches.batch_at`.

        Raises:
            InputError: for a bad document, when it comes, by its place.
        """
        size = self.shape[0] * self.shape[1]
        if step < self._next or self._next < 0:
            self._rows, self._next = self._all_rows(), 0
        # If this fails, what is read is lost.
        behind, self._next = (step - self._next) * size, -1
        rows = list(itertools.islice(self._rows, behind, behind + size))
        self._next = step + 1
        return filled_batch(rows, self.shape, self.config.seq_len, self.config.packing)

    def fingerprint(self) -> str:
        """A hash of what is read, by name and size, and of how."""
        config = self.config
        sizes = [size_of(file) for part in self.parts for file in part.files]
        about = (self.parts, sizes, fingerprint(self.tok), config.shuffle_buffer, config.overlong)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def mixed(self, others: Any, weights: Any) -> Any:
        raise NotImplementedError("A stream mixes its parts itself.")

    def _all_rows(self) -> Iterator[list[Example]]:
        weights = weights_of(self.parts)
        if weights is None:
            yield from self._rows_of(self.parts, 0)
            return
        each = [self._rows_of((part,), i) for i, part in enumerate(self.parts)]
        turns = Turns(weights)
        for place in itertools.count():
            yield next(each[turns[place][0]])

    def _rows_of(self, parts: Sequence[Part], which: int) -> Iterator[list[Example]]:
        """Rows without end."""
        config = self.config
        for epoch in itertools.count():
            seed = (config.seed, which * 2**32 + epoch)
            records = shuffled(self._records(parts), config.shuffle_buffer, seed)
            examples = self._examples(records)
            rows: Iterator[list[Example]] = ([example] for example in examples)
            if config.packing:
                rows = packed(((e, len(e.ids)) for e in examples), config.seq_len)
            count = 0
            for row in rows:
                count += 1
                yield row
            if not count:
                names = ", ".join(part.name for part in parts)
                raise InputError(
                    f"Nothing in {names} has a target within seq_len={config.seq_len} tokens."
                )

    def _records(self, parts: Sequence[Part]) -> Iterator[Record]:
        for where, found in found_in(parts, self.kinds, streaming=True):
            if isinstance(found, str):
                raise InputError(f"The training data has a bad document. {where}: {found}.")
            yield Record(where, found)

    def _examples(self, records: Iterable[Record]) -> Iterator[Example]:
        config = self.config
        documents = encoded(self.tok, records, config.train_on)
        while together := list(itertools.islice(documents, TOGETHER)):
            examples = cut(in_memory(together), config.seq_len, config.overlong)
            if not self._told:
                tell_overlong(examples.overlong, len(together), config.seq_len, config.overlong)
                self._told = examples.overlong > 0
            yield from examples


def shuffled(records: Iterable[Record], size: int, seed: tuple[int, int]) -> Iterator[Record]:
    """Each record waits among `size` others for its turn. Not grain's shuffle of a window, which
    keeps every record within its window.
    """
    numbers = _numbers(seed)
    waiting: list[Record] = []
    for record in records:
        if len(waiting) < size:
            waiting.append(record)
            continue
        at = next(numbers) % size
        yield waiting[at]
        waiting[at] = record
    while waiting:
        at = next(numbers) % len(waiting)
        waiting[at], waiting[-1] = waiting[-1], waiting[at]
        yield waiting.pop()


def _numbers(seed: tuple[int, int]) -> Iterator[int]:
    # The raw numbers are the same with every NumPy.
    draw = np.random.Philox(key=np.array(seed, np.uint64))
    while True:
        yield from draw.random_raw(1024).tolist()
