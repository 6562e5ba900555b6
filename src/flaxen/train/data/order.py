"""Which rows a step has: a pure function of the seed and the step, the same in every process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

FINEST = 10**6
"""Weights are exact up to their share of so many rows."""

MEGABATCH = 50
"""Steps whose rows are sorted by length together."""


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` things that no version of any library changes: for what is arranged
    once for all, such as which documents share a row.
    """
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(draws, kind="stable")


@dataclasses.dataclass(frozen=True)
class Order:
    """Rows of one or more parts, in numbers that go on from part to part.

    counts: rows of each part; size: rows of a step. Without weights an epoch has every row once and
    its last step may have fewer. With weights the parts take turns in these proportions, exactly in
    every cycle of turns and nearly in every stretch; each goes round on its own, in another order
    each time, and an epoch is as many rows as all parts have.

    The order of a part is grain's `shuffle`: any place of it costs the same, and nothing of the
    length of the data is kept. Its authors test that it stays the same over versions but promise
    nothing (https://github.com/google/grain/pull/1250), so that `probe` is part of what a run that
    goes on must have in common.
    """

    counts: tuple[int, ...]
    seed: int
    size: int
    weights: tuple[float, ...] | None = None

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return -(-sum(self.counts) // self.size)

    def rows(self, step: int) -> list[int]:
        """Row numbers of a step."""
        if self.weights is not None:
            return self._places(step * self.size, (step + 1) * self.size)
        total = sum(self.counts)
        epoch, within = divmod(step, self.per_epoch)
        stop = min((within + 1) * self.size, total)
        return self._places(epoch * total + within * self.size, epoch * total + stop)

    def probe(self) -> str:
        """A hash of the first rows."""
        first = self._places(0, min(sum(self.counts), 64))
        return hashlib.sha256(repr(first).encode()).hexdigest()[:16]

    def _places(self, start: int, stop: int) -> list[int]:
        return [int(self._numbers[place]) for place in range(start, stop)]

    @functools.cached_property
    def _numbers(self) -> Any:
        import grain

        starts = np.cumsum([0, *self.counts])
        if self.weights is None:
            return grain.MapDataset.range(int(starts[-1])).shuffle(_seed(self.seed, 0))
        parts = [
            grain.MapDataset.range(int(a), int(b)).shuffle(_seed(self.seed, i))
            for i, (a, b) in enumerate(itertools.pairwise(starts))
        ]
        # grain.MapDataset.mix rounds proportions to multiples of a hundredth of the least.
        turns: Any = Turns(self.weights)
        return grain.MapDataset.select_from_datasets(parts, turns)


def _seed(seed: int, part: int) -> int:
    """Of 32 bits. Grain adds the epoch to it: near seeds would be each other's later epochs."""
    return int.from_bytes(hashlib.sha256(f"{seed} {part}".encode()).digest()[:4], "little")


class Turns:
    """Whose turn it is at place 0, 1, ..., and at which of its own places: a selection map."""

    def __init__(self, weights: Sequence[float]):
        shares = whole_shares(weights)
        owners = np.repeat(np.arange(len(shares)), shares)
        nth = np.concatenate([np.arange(share) for share in shares])
        # The middle of each turn, were all turns of a part spread evenly.
        turns = np.argsort((2 * nth + 1) / np.repeat(shares, shares), kind="stable")
        self.owners, self.nth, self.shares = owners[turns], nth[turns], shares

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, place: int) -> tuple[int, int]:
        cycle, at = divmod(place, len(self.owners))
        part = int(self.owners[at])
        return part, cycle * self.shares[part] + int(self.nth[at])


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Weights as the least whole numbers in the same proportions; at most `FINEST` together."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    if sum(whole) // math.gcd(*whole) > FINEST:
        whole = [max(round(share / sum(exact) * FINEST), 1) for share in exact]
    return [share // math.gcd(*whole) for share in whole]


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Steps whose rows are about equally long: those of `MEGABATCH` steps of an order are sorted,
    cut into steps again, and these come in an order of their own.
    """

    order: Order
    lengths: np.ndarray
    _kept: dict[int, list[list[int]]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def per_epoch(self) -> int:
        return self.order.per_epoch

    def probe(self) -> str:
        return self.order.probe()

    def rows(self, step: int) -> list[int]:
        epoch, within = divmod(step, self.per_epoch)
        mega, at = divmod(within, MEGABATCH)
        first = epoch * self.per_epoch + mega * MEGABATCH
        if first not in self._kept:
            self._kept.clear()
            self._kept[first] = self._steps(
                first, min(MEGABATCH, self.per_epoch - mega * MEGABATCH)
            )
        return self._kept[first][at]

    def _steps(self, first: int, count: int) -> list[list[int]]:
        rows = np.concatenate([self.order.rows(first + i) for i in range(count)])
        rows = rows[np.argsort(-self.lengths[rows], kind="stable")].tolist()
        steps = [rows[i : i + self.order.size] for i in range(0, len(rows), self.order.size)]
        return [steps[i] for i in permutation(self.order.seed, first, len(steps))]
