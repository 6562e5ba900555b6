"""Zip files: where the bytes of each entry lie, to be seen through a map.

Format: APPNOTE.TXT of PKWARE, with its 64-bit extension.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxen.core.errors import CheckpointError

MAX_ENTRIES = 1 << 20
LARGE = 0xFFFFFFFF
"""Stands where a number has its place in the 64-bit extension."""

END = struct.Struct("<4s4H2LH")
LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")


class Part(NamedTuple):
    """Where the bytes of an entry lie in the file; `plain` if they are the entry as it is."""

    start: int
    size: int
    plain: bool = True


class _Entry(NamedTuple):
    name: bytes
    header: int
    size: int
    plain: bool


def stored_parts(path: Path, memory: np.ndarray) -> dict[str, Part]:
    """Every entry of a zip file by name, once all have proved to lie in it, apart from each other.

    Raises:
        CheckpointError: it is damaged.
    """
    reader = _Reader(path, memory)
    entries, directory = reader.entries()
    parts: dict[str, Part] = {}
    free = 0
    for entry in sorted(entries, key=lambda e: e.header):
        name = entry.name.decode("utf-8", errors="replace")
        part = reader.located(entry, name)
        if entry.header < free or part.start + part.size > directory:
            raise reader.damaged(f"its entry {name!r} overlaps another part of the file")
        if name in parts:
            raise reader.damaged(f"its entry {name!r} stands twice in it")
        free, parts[name] = part.start + part.size, part
    return parts


class _Reader:
    def __init__(self, path: Path, memory: np.ndarray):
        self.path, self.memory = path, memory

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged or incomplete: {why}. Fetch or write it again."
        )

    def bytes(self, start: int, size: int) -> bytes:
        if start < 0 or start + size > self.memory.size:
            raise self.damaged(f"it ends at byte {self.memory.size}, before what it speaks of")
        return self.memory[start : start + size].tobytes()

    def fields(self, form: struct.Struct, start: int, magic: bytes) -> tuple[int, ...]:
        found, *numbers = form.unpack(self.bytes(start, form.size))
        if found != magic:
            raise self.damaged(f"no zip header stands at byte {start}")
        return tuple(numbers)

    def entries(self) -> tuple[list[_Entry], int]:
        """The directory's entries, and where it begins."""
        count, size, start = self._directory()
        if count > MAX_ENTRIES or count * CENTRAL.size > size:
            raise self.damaged(f"its directory of {size} bytes cannot hold {count} entries")
        raw, at, found = self.bytes(start, size), 0, []
        for _ in range(count):
            if at + CENTRAL.size > size:
                raise self.damaged("its directory is too short")
            entry, at = self._entry(raw, at)
            found.append(entry)
        return found, start

    def _directory(self) -> tuple[int, int, int]:
        """How many entries there are, and size and start of the list of them."""
        tail = max(0, self.memory.size - END.size - 0xFFFF)
        at = self.memory[tail:].tobytes().rfind(b"PK\5\6")
        if at < 0:
            raise self.damaged("it has no zip directory at its end")
        end = tail + at
        *_, count, size, start, _ = self.fields(END, end, b"PK\5\6")
        if LARGE in (size, start) or count == 0xFFFF:
            _, at64, _ = self.fields(LOCATOR, end - LOCATOR.size, b"PK\6\7")
            *_, count, size, start = self.fields(END64, at64, b"PK\6\6")
        return count, size, start

    def _entry(self, raw: bytes, at: int) -> tuple[_Entry, int]:
        magic, *fields = CENTRAL.unpack_from(raw, at)
        _, _, flags, method, _, _, _, packed, size, name, extra, comment, *_, header = fields
        stop = at + CENTRAL.size + name + extra + comment
        if magic != b"PK\1\2" or stop > len(raw):
            raise self.damaged("its directory is no list of entries")
        name_stop = at + CENTRAL.size + name
        text = raw[at + CENTRAL.size : name_stop]
        large = iter(_large(raw[name_stop : name_stop + extra]))
        size, packed, header = (
            next(large, LARGE) if value == LARGE else value for value in (size, packed, header)
        )
        return _Entry(text, header, packed, not (flags & 1 or method or packed != size)), stop

    def located(self, entry: _Entry, name: str) -> Part:
        """The entry's bytes, behind a header of its own."""
        *_, length, extra = self.fields(LOCAL, entry.header, b"PK\3\4")
        start = entry.header + LOCAL.size
        if self.bytes(start, length) != entry.name:
            raise self.damaged(f"its entry {name!r} has another name in the directory")
        return Part(start + length + extra, entry.size, entry.plain)


def _large(extra: bytes) -> list[int]:
    """The numbers of the 64-bit extension, if it is among an entry's extra fields."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + size]
            return [n for (n,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        at += 4 + size
    return []
