"""Several documents in one row, none of which sees or predicts another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from flaxen.layers.cross_entropy import IGNORED
from flaxen.train.data.examples import Example

LOOK_BACK = 64
"""How many unfilled rows are tried before a new one is begun."""

Item = TypeVar("Item")


def packed(items: Iterable[tuple[Item, int]], seq_len: int) -> Iterator[list[Item]]:
    """Rows of whole items, each given with its length: an item goes to the first of the last 64
    open rows where it fits. A row is given out once it is full, or the oldest of too many.
    """
    rows: list[list[Item]] = []
    room: list[int] = []
    for item, length in items:
        at = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if at == len(rows):
            if at == LOOK_BACK:
                at -= 1
                room.pop(0)
                yield rows.pop(0)
            rows.append([])
            room.append(seq_len)
        rows[at].append(item)
        room[at] -= length
        if room[at] < 2:
            room.pop(at)
            yield rows.pop(at)
    yield from rows


def pack(lengths: Sequence[int] | np.ndarray, seq_len: int) -> list[list[int]]:
    """Rows of examples, by their number."""
    return list(packed(enumerate(np.asarray(lengths).tolist()), seq_len))


def blank(rows: int, width: int, packed: bool) -> dict[str, np.ndarray]:
    """Rows without any document."""
    keys = ("ids", "targets", "positions", "segments") if packed else ("ids", "targets")
    batch = {key: np.zeros((rows, width), np.int32) for key in keys}
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


def filled_batch(
    rows: Sequence[Sequence[Example]], shape: tuple[int, int], width: int, packed: bool
) -> dict[str, np.ndarray]:
    """Rows as a batch, int32 (accumulation, B, width): ids, targets (at the slot that predicts
    them) and, if packed, positions and segments. shape: (accumulation, B); rows that lack stay
    empty.
    """
    batch = blank(shape[0] * shape[1], width, packed)
    for i, row in enumerate(rows):
        fill({key: array[i] for key, array in batch.items()}, row)
    return {key: array.reshape(*shape, width) for key, array in batch.items()}
