"""Why a conversion did not give what the model wants: the keys that are absent or odd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.transforms.naming import Entry

FEW = 8
"""Keys named before the rest is only counted."""


def complaints(entry: Entry, tensors: Mapping[str, LazyTensor], count: int | None) -> list[str]:
    """What is wrong with the keys of an entry, a sentence each; empty if nothing is.

    count: how many tensors of each pattern there should be, if that is known.
    """
    patterns = entry.converter.source_patterns
    lists = {i: _counted(keys) for i, keys in entry.keys.items()}
    indices = {n for found in lists.values() if found for n in found.numbers}
    most = max(count or 0, max(indices, default=-1) + 1)
    out = [
        f"No tensor matches {pattern!r}."
        for i, pattern in enumerate(patterns)
        if i not in entry.keys
    ]
    place = next((found.place for found in lists.values() if found), None)
    absent = []
    for i, keys in entry.keys.items():
        found = lists[i] or _single(keys, place)
        have = found.numbers if found else ()
        absent += [found.named(n) for n in range(most) if n not in have] if found else []
    if absent:
        more = f" and {len(absent) - FEW} more" if len(absent) > FEW else ""
        out.append(f"Missing: {', '.join(absent[:FEW])}{more}.")
    for keys in entry.keys.values():
        kinds = {key: (tensors[key].shape, tensors[key].dtype) for key in keys}
        (shape, dtype), _ = Counter(kinds.values()).most_common(1)[0]
        out += [
            f"{key} is {tensors[key].dtype}{list(tensors[key].shape)}, the others are "
            f"{dtype}{list(shape)}."
            for key, kind in kinds.items()
            if kind != (shape, dtype)
        ][:FEW]
    return out


class _Counted(NamedTuple):
    """Keys that differ in one number only."""

    pieces: list[str]
    place: int
    numbers: frozenset[int]

    def named(self, number: int) -> str:
        return ".".join([*self.pieces[: self.place], str(number), *self.pieces[self.place + 1 :]])


def _counted(keys: list[str]) -> _Counted | None:
    rows = [key.split(".") for key in keys]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1:
        return None
    varying = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1 or not all(row[varying[0]].isdecimal() for row in rows):
        return None
    place = varying[0]
    return _Counted(rows[0], place, frozenset(int(row[place]) for row in rows))


def _single(keys: list[str], place: int | None) -> _Counted | None:
    """A lone key, whose number is where that of its neighbours is."""
    pieces = keys[0].split(".")
    if place is None or place >= len(pieces) or not pieces[place].isdecimal():
        return None
    return _Counted(pieces, place, frozenset([int(pieces[place])]))
