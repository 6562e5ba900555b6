"""Documents of all kinds of data, checked whole before anything is made of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError
from flaxen.train.data.columns import under_our_names
from flaxen.train.data.files import Found, documents, kind_of_file, reading
from flaxen.train.data.hub import hub_documents, hub_fingerprint
from flaxen.train.data.kinds import CAUSAL, expected, problem_of
from flaxen.train.data.parts import Part, parts_of
from flaxen.train.settings import Paths

SHOWN = 5
"""How many bad lines one error lists."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One document and where it came from: `file:line`."""

    where: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Records:
    """Every document of some parts; read anew each time, so that they need not fit into memory.
    They are checked when they are first counted or gone through: kinds are those of `kinds.KINDS`
    that may be there.

    Raises:
        InputError: listing every bad line (the first five in full); no document at all.
    """

    parts: tuple[Part, ...]
    kinds: tuple[str, ...] = CAUSAL

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        if self._count:
            for where, found in found_in(self.parts, self.kinds):
                if isinstance(found, str):
                    raise InputError(f"The training data has changed. {where}: {found}.")
                yield Record(where, found)

    @functools.cached_property
    def _count(self) -> int:
        count, problems = 0, 0
        shown: list[str] = []
        for where, found in found_in(self.parts, self.kinds):
            if isinstance(found, str):
                problems += 1
                if problems <= SHOWN:
                    shown.append(f"{where}: {found}")
            else:
                count += 1
        if problems:
            more = f"\n... and {problems - SHOWN} more" if problems > SHOWN else ""
            raise InputError(
                f"The training data has bad lines; expected on each: {expected(self.kinds)}.\n"
                + "\n".join(shown)
                + more
            )
        if not count:
            raise InputError(
                f"There is no document in {', '.join(part.name for part in self.parts)}."
            )
        return count

    def size(self) -> int:
        """Bytes of all files; a dataset of the hub counts as none."""
        return sum(size_of(file) for part in self.parts for file in part.files)

    def digest(self) -> str:
        """A hash of all bytes that are read, and of how they are."""
        digest = hashlib.sha256(repr(self.kinds).encode())
        for part in self.parts:
            digest.update(repr(part.columns).encode())
            for file in part.files:
                digest.update(f"{kind_of_file(file)} {file.suffix} {_hash_of(file)}".encode())
            if part.hub is not None:
                digest.update(f"{part.hub} {hub_fingerprint(part.hub)}".encode())
        return digest.hexdigest()


def _hash_of(file: Path) -> str:
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_of(file: Path) -> int:
    """Bytes of a file.

    Raises:
        InputError: it is not there any more, or cannot be read.
    """
    with reading(file):
        return file.stat().st_size


def read_records(paths: Paths, kinds: Sequence[str] = CAUSAL) -> list[Record]:
    """Every document of files, globs, folders or datasets of the hub, as a list.

    Raises:
        InputError: listing every bad line (the first five in full).
    """
    return list(Records(parts_of(paths), tuple(kinds)))


def found_in(
    parts: Sequence[Part], kinds: Sequence[str], streaming: bool = False
) -> Iterator[Found]:
    """(where, fields or what is wrong with them) for each document."""
    for part in parts:
        for where, found in _raw(part, streaming):
            if not isinstance(found, str):
                found = under_our_names(found, part.columns)
            if not isinstance(found, str):
                found = problem_of(found, kinds) or found
            yield where, found


def _raw(part: Part, streaming: bool) -> Iterator[Found]:
    for file in part.files:
        yield from documents(file)
    if part.hub is not None:
        yield from hub_documents(part.hub, streaming)
