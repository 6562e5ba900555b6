"""One record to a row, padded: batches of several arrays, a pure function of seed and step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxen.train.data.order import Order

Row = Mapping[str, np.ndarray]
"""By key a number, (), or tokens, (n,)."""


def _as_they_are(rows: Sequence[Row]) -> Sequence[Row]:
    return rows


@dataclasses.dataclass(frozen=True)
class RowBatches:
    """All batches of a run: `batch_at(step)` for any step, in any order.

    blank: a row without anything, as long as rows may be; what a row does not fill stays as it is
    there, and the last batch of an epoch is filled up with blank rows. compose: what becomes of the
    rows that share a micro-batch. counts: rows of each part of a mixture, which are taken in
    proportion to `weights`.
    """

    rows: Sequence[Row]
    blank: Row
    batch_size: int
    accumulation: int
    seed: int
    compose: Callable[[Sequence[Row]], Sequence[Row]] = _as_they_are
    counts: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None

    @functools.cached_property
    def order(self) -> Order:
        """Which rows a step has."""
        counts = self.counts or (len(self.rows),)
        return Order(counts, self.seed, self.batch_size * self.accumulation, self.weights)

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return self.order.per_epoch

    def mixed(self, others: Sequence[RowBatches], weights: Sequence[float]) -> RowBatches:
        """One source of this and others, by weight."""
        sources = (self, *others)
        return dataclasses.replace(
            self,
            rows=[row for source in sources for row in source.rows],
            blank={key: value for source in sources for key, value in source.blank.items()},
            counts=tuple(len(source.rows) for source in sources),
            weights=tuple(weights),
        )

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """Each key of `blank`: (accumulation, B) or (accumulation, B, T)."""
        chosen = self.order.rows(step)
        shape = (self.accumulation, self.batch_size)
        batch = {
            key: np.broadcast_to(array, (*shape, *array.shape)).copy()
            for key, array in self.blank.items()
        }
        for micro in range(self.accumulation):
            here = chosen[micro * self.batch_size :][: self.batch_size]
            for i, row in enumerate(self.compose([self.rows[number] for number in here])):
                for key, value in row.items():
                    batch[key][micro, i : i + 1][..., : value.size] = value
        return batch

    def fingerprint(self) -> str:
        """A hash of every row."""
        digest = hashlib.sha256(f"{self.order.probe()} {self.weights}".encode())
        for row in self.rows:
            for key in sorted(row):
                digest.update(key.encode() + row[key].tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:16]


def at_least_one(mask: Any) -> Any:
    """The mask (..., T) with the first slot of rows without a token: what sees nothing has no mean,
    and would make the gradient of all NaN.
    """
    empty = ~(mask > 0).any(-1)
    return mask.at[..., 0].set(jnp.where(empty, 1, mask[..., 0]))


def row_batches(rows: Sequence[Row], blank: Row, config: Any, accumulation: int) -> RowBatches:
    """Batches as the settings have them."""
    return RowBatches(rows, blank, config.batch_size, accumulation, config.seed)


def number(value: float, dtype: Any = np.int32) -> np.ndarray:
    """A number of a row."""
    return np.asarray(value, dtype)


def tokens(values: Sequence[int]) -> np.ndarray:
    """Tokens of a row."""
    return np.asarray(values, np.int32)


def filled(length: int, value: int) -> np.ndarray:
    """What stands where a row has no tokens."""
    return np.full(length, value, np.int32)
