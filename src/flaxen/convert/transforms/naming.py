"""What each key of a checkpoint becomes, decided by names alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from flaxen.convert.transforms.converter import WeightConverter
from flaxen.convert.transforms.pattern import natural_key
from flaxen.convert.transforms.transform import Match, WeightTransform


class Shift(NamedTuple):
    """What is taken off the front of a name, and what is put there."""

    off: str = ""
    on: str = ""

    def __call__(self, name: str) -> str:
        return self.on + name.removeprefix(self.off)


@dataclasses.dataclass
class Entry:
    """The keys that a converter takes together, and where its results go."""

    converter: WeightConverter
    match: Match
    """Of any of its keys: what is around the pattern and in its group is the same for all."""
    shift: Shift
    keys: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """Index of the source pattern -> the checkpoint's keys in natural order."""
    used: set[int] = dataclasses.field(default_factory=set)

    @property
    def targets(self) -> list[str]:
        """The target patterns, with what the group took."""
        return [self.match.fill(target) for target in self.converter.target_patterns]

    def full(self, target: str) -> str:
        """The whole name of a target."""
        return self.shift(f"{self.match.prefix}{target}{self.match.suffix}")

    def every_key(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


@dataclasses.dataclass
class Naming:
    plain: dict[str, str] = dataclasses.field(default_factory=dict)
    """Wanted name -> key."""
    entries: dict[tuple[int, str], Entry] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    used: set[int] = dataclasses.field(default_factory=set)
    """Indices of the renamings behind `plain`."""


def name_keys(
    keys: Iterable[str],
    transforms: Sequence[WeightTransform],
    wanted: Collection[str],
    base_prefix: str,
) -> Naming:
    """Sort the keys out: all renamings in order, then at most one converter, then the base prefix.

    Where that leads to no wanted name, the last name on the way that is wanted stands. Of two keys
    for one name the one that had it from the start wins, else the first.
    """
    ways = _ways(keys, transforms)
    converters = [(i, t) for i, t in enumerate(transforms) if isinstance(t, WeightConverter)]
    out = Naming()
    taken: dict[str, list[list[_Step]]] = {}
    for way in ways:
        renamed = way[-1].name
        i, converter, found = _first_match(renamed, converters)
        name = renamed if found is None else found.named(converter.target_patterns[0])
        shift = _shift(counted(name), wanted, base_prefix)
        if shift is None:
            standing = next((j for j in reversed(range(len(way))) if way[j].name in wanted), None)
            if standing is None:
                out.unexpected.append(way[0].name)
            else:
                taken.setdefault(way[standing].name, []).append(way[: standing + 1])
        elif found is None:
            taken.setdefault(shift(name), []).append(way)
        else:
            entry = out.entries.setdefault((i, shift(name)), Entry(converter, found, shift))
            entry.keys.setdefault(found.index, []).append(way[0].name)
            entry.used.update(step.by for step in way[1:])
    for name, rivals in taken.items():
        winner = next((way for way in rivals if way[0].name == name), rivals[0])
        out.plain[name] = winner[0].name
        out.used.update(step.by for step in winner[1:])
        out.unexpected += [way[0].name for way in rivals if way is not winner]
    return out


def counted(name: str) -> str:
    """A name whose target has a glob, for the first of its tensors."""
    return name.replace("*", "0")


class _Step(NamedTuple):
    name: str
    by: int
    """Index of the renaming that gave this name."""


def _ways(keys: Iterable[str], transforms: Sequence[WeightTransform]) -> list[list[_Step]]:
    """For each key in natural order its names on the way, from its own to the fully renamed one."""
    ways = [[_Step(key, -1)] for key in sorted(keys, key=natural_key)]
    for i, transform in enumerate(transforms):
        if isinstance(transform, WeightConverter):
            continue
        rename = transform.over([way[-1].name for way in ways])
        for way in ways:
            name, pattern = rename(way[-1].name)
            if pattern is not None:
                way.append(_Step(name, i))
    return ways


def _first_match(
    name: str, converters: Sequence[tuple[int, WeightConverter]]
) -> tuple[int, WeightConverter, Match] | tuple[None, None, None]:
    for i, converter in converters:
        found = converter.match(name)
        if found is not None:
            return i, converter, found
    return None, None, None


def _shift(name: str, wanted: Collection[str], prefix: str) -> Shift | None:
    """What makes a name a wanted one: nothing, or the base prefix less or more; else None."""
    if name in wanted:
        return Shift()
    if prefix and name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in wanted:
        return Shift(off=f"{prefix}.")
    return Shift(on=f"{prefix}.") if prefix and f"{prefix}.{name}" in wanted else None
