"""What a compiled program sends between devices: read off its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0}

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)"
    r"=%?([\w.\-]+)"
)
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
SENDS = re.compile(rf" = (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
LOOP = re.compile(r" while\(")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BOUND = re.compile(r" s32\[\]\S* constant\((\d+)\)")
SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")

NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?"
    r"\{([^}]*)\}"
)
"""Groups as axes of a mesh, whose devices may be in another order."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Operations of one kind over the same axes of the mesh.

    count: how often a step does it, loops counted in full; nbytes: what one device sends in all of
    them, going round a ring; axes: of the mesh, in its order; empty where the text does not tell.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    count: int
    nbytes: int


@dataclasses.dataclass
class _Computation:
    """Of one computation: what it sends, as (kind, bytes, devices, axes), and what it calls, as
    (name, times).
    """

    sends: list[tuple[str, int, int, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    bound: int = 1


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Everything that the program sends in one run, the most bytes first."""
    found, entry = _computations(text, mesh)
    times = _times(found, entry)
    totals: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
    for name, computation in found.items():
        for kind, nbytes, devices, axes in computation.sends:
            total = totals.setdefault((kind, axes, devices), [0, 0])
            total[0] += times.get(name, 0)
            total[1] += times.get(name, 0) * nbytes
    made = [Collective(*key, count, nbytes) for key, (count, nbytes) in totals.items() if count]
    return sorted(made, key=lambda each: -each.nbytes)


def _computations(text: str, mesh: Mapping[str, int]) -> tuple[dict[str, _Computation], str]:
    found: dict[str, _Computation] = {}
    entry, here, bodies = "", _Computation(), []
    scatters: set[str] = set()
    for line in text.splitlines():
        if not line.startswith((" ", "}")) and (head := HEAD.match(line)):
            here = found[head[2]] = _Computation()
            entry = head[2] if head[1] else entry
            if "all-reduce-scatter" in head[2]:
                scatters.add(head[2])
            continue
        if bound := BOUND.search(line):
            here.bound = max(here.bound, int(bound[1]))
        if sent := _sent(line, mesh):
            here.sends.append(sent)
        called = CALLS.findall(line)
        called += [name.strip(" %") for each in BRANCHES.findall(line) for name in each.split(",")]
        if LOOP.search(line):
            bodies.append((here, line, called))
        else:
            here.calls += [(name, 1) for name in called]
    for where, line, called in bodies:
        known = TRIPS.search(line)
        # Without a count, the loop's condition compares with its end.
        end = CONDITION.search(line)
        bound = found[end[1]].bound if end and end[1] in found else 1
        where.calls += [(name, int(known[1]) if known else bound) for name in called]
    for name in scatters:
        found[name].sends = [_as_scatter(each) for each in found[name].sends]
    return found, entry


def _times(found: Mapping[str, _Computation], entry: str) -> dict[str, int]:
    """How often each computation runs."""
    times: dict[str, int] = {}

    def run(name: str, count: int) -> None:
        if name in found:
            times[name] = times.get(name, 0) + count
            for called, turns in found[name].calls:
                run(called, count * turns)

    run(entry, 1)
    return times


def _sent(line: str, mesh: Mapping[str, int]) -> tuple[str, int, int, tuple[str, ...]] | None:
    match = SENDS.search(line)
    if match is None:
        return None
    groups = _pairs(line) if match["kind"] == "collective-permute" else _groups(line, mesh)
    devices = max((len(group) for group in groups), default=math.prod(mesh.values()))
    if devices < 2:
        return None
    sizes = [_nbytes(kind, dims) for kind, dims in SHAPE.findall(match["type"])]
    # A started operation's type has what it is given beside what it makes.
    started = match["start"] and match["kind"] != "all-reduce"
    whole = max(sizes, default=0) if started else sum(sizes)
    if match["kind"] == "reduce-scatter" and not started:
        whole *= devices
    share = (devices - 1) / devices
    factor = {"all-reduce": 2 * share, "collective-permute": 1}.get(match["kind"], share)
    axes = _axes(groups, mesh)
    if match["kind"] == "collective-permute":
        devices = math.prod(mesh[axis] for axis in axes)
    return match["kind"], int(whole * factor), devices, axes


def _as_scatter(sent: tuple[str, int, int, tuple[str, ...]]) -> tuple[str, int, int, tuple]:
    """An all-reduce of which each device keeps its part: the compiler runs both as one."""
    kind, nbytes, devices, axes = sent
    return ("reduce-scatter", nbytes // 2, devices, axes) if kind == "all-reduce" else sent


def _nbytes(kind: str, dims: str) -> int:
    bits = BITS.get(kind)
    if bits is None:
        digits = re.search(r"\d+", kind)
        bits = int(digits[0]) if digits else 8
    sizes = [int(size.strip("<=")) for size in dims.split(",") if size]
    return math.prod(sizes) * bits // 8


def _groups(line: str, mesh: Mapping[str, int]) -> list[list[int]]:
    """Devices that speak with each other, by their number, in each of three notations."""
    count = math.prod(mesh.values())
    if found := NAMED.search(line):
        named = [(n, int(s)) for n, s in re.findall(r"'?([\w.\-]+)'?=(\d+)", found[1])]
        wanted = re.findall(r"'([\w.\-]+)'", found[4])
        dims, over = [s for _, s in named], [i for i, (n, _) in enumerate(named) if n in wanted]
        rest = [i for i in range(len(dims)) if i not in over]
        order = np.arange(math.prod(dims))
        if found[2]:
            order = order.reshape(_numbers(found[2]))
            order = order.transpose(_numbers(found[3])) if found[3] else order
        order = order.reshape(dims).transpose(*rest, *over)
        return order.reshape(-1, math.prod([dims[i] for i in over])).tolist()
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims = _numbers(found[1]), _numbers(found[2])
        order = np.arange(math.prod(dims)).reshape(dims)
        order = order.transpose(_numbers(found[3])) if found[3] else order
        return order.reshape(shape[0], -1).tolist()
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    return [list(range(count))]


def _pairs(line: str) -> list[list[int]]:
    found = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line)
    return [_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", found[1])] if found else []


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which devices of a group differ."""
    sizes, found = tuple(mesh.values()), set()
    for group in groups:
        places = np.array(np.unravel_index([d % math.prod(sizes) for d in group], sizes))
        found |= {i for i, place in enumerate(places) if len(set(place.tolist())) > 1}
    return tuple(axis for i, axis in enumerate(mesh) if i in found)


def sent_bytes(found: Iterator[Collective] | Sequence[Collective]) -> int:
    """What one device sends in all of them."""
    return sum(each.nbytes for each in found)
