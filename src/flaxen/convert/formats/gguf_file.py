"""The header of a GGUF file: metadata, and where each tensor lies.

Source: the GGUF specification, versions 2 and 3 (little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flaxen.convert.formats.source import possible
from flaxen.core.errors import CheckpointError

SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
MAX_AXES = 4
MAX_NESTING = 4


@dataclass(frozen=True)
class TensorType:
    """How one kind of tensor is stored: `block` values of the last axis in `size` bytes."""

    name: str
    block: int
    size: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    30: TensorType("BF16", 1, 2),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its shape in numpy order, and its bytes from `start` of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    bytes: int


class GgufFile:
    """A GGUF file mapped into memory.

    `metadata` holds strings, numbers, lists and numpy arrays; `tensors` is by name.

    Raises CheckpointError for a file that is damaged, cut short or of a kind that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            with open(self.path, "rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error}).") from error
        walk = _Walk(self.path, self.buffer)
        tensors, pairs = walk.preamble()
        self.metadata: dict[str, Any] = walk.metadata(pairs)
        self.tensors = walk.tensors(tensors, self.metadata.get("general.alignment", 32))


class _Walk:
    """Reads a header front to back; nothing is read or allocated past the end of the file."""

    def __init__(self, path: str, buffer: mmap.mmap):
        self.path, self.buffer, self.size, self.at = path, buffer, len(buffer), 0
        self.readers: dict[int, Callable[[], Any]] = {
            kind: partial(self.number, struct.Struct(form)) for kind, form in SCALARS.items()
        }
        self.readers |= {STRING: self.string, ARRAY: self.array}
        self.nesting = 0
        self.u32, self.u64 = struct.Struct("<I"), struct.Struct("<Q")

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} Download or convert the file again.")

    def claim(self, size: int, what: str) -> int:
        start, self.at = self.at, self.at + size
        if self.at > self.size:
            raise self.fail(
                f"the file ends at byte {self.size}, but {what} at byte {start} needs {size} bytes."
            )
        return start

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.buffer, self.claim(form.size, "a number"))[0]

    def string(self) -> str:
        length = self.number(self.u64)
        start = self.claim(length, "a string")
        # Vocabularies hold pieces of characters in a few old files: they must not stop the reading.
        return self.buffer[start : start + length].decode("utf-8", errors="replace")

    def array(self) -> Any:
        kind, count = self.number(self.u32), self.number(self.u64)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            start = self.claim(count * dtype.itemsize, f"an array of {count} numbers")
            return np.frombuffer(self.buffer, dtype, count, start)
        if count * 8 > self.size - self.at:
            raise self.fail(f"an array at byte {self.at} says it has {count} items: more than fit.")
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise self.fail(f"arrays nested deeper than {MAX_NESTING} at byte {self.at}.")
        values = [self.value(kind) for _ in range(count)]
        self.nesting -= 1
        return values

    def value(self, kind: int) -> Any:
        if kind not in self.readers:
            raise self.fail(f"value type {kind} at byte {self.at} is not one of GGUF's.")
        return self.readers[kind]()

    def preamble(self) -> tuple[int, int]:
        magic = self.buffer[:4]
        if magic != b"GGUF":
            raise CheckpointError(
                f"{self.path}: not a GGUF file: it begins with {magic!r}, not b'GGUF'."
            )
        self.at = 4
        version = self.number(self.u32)
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise self.fail(f"a {kind} file; little-endian versions 2 and 3 can be read.")
        tensors, pairs = self.number(self.u64), self.number(self.u64)
        # The shortest pair is 13 bytes (length, type, one byte), the shortest tensor entry 24.
        if pairs * 13 + tensors * 24 > self.size:
            raise self.fail(
                f"says it has {tensors} tensors and {pairs} metadata values: more than fit."
            )
        return tensors, pairs

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in found:
                raise self.fail(f"metadata key {key!r} appears twice.")
            found[key] = self.value(self.number(self.u32))
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}, not a power of two.")
        entries = [self.entry() for _ in range(count)]
        data = -(-self.at // alignment) * alignment
        found: dict[str, TensorEntry] = {}
        for name, kind, shape, offset in entries:
            if name in found:
                raise self.fail(f"tensor {name!r} appears twice.")
            found[name] = self.located(name, kind, shape, data + offset)
        return found

    def entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name, axes = self.string(), self.number(self.u32)
        if axes > MAX_AXES:
            raise self.fail(f"tensor {name!r} has {axes} axes; GGUF allows {MAX_AXES}.")
        shape = tuple(self.number(self.u64) for _ in range(axes))[::-1]
        return name, self.number(self.u32), shape, self.number(self.u64)

    def located(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorEntry:
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type number {kind}, which cannot be read. "
                f"Can be read: {', '.join(t.name for t in TYPES.values())}."
            )
        stored = TYPES[kind]
        if not shape or shape[-1] % stored.block:
            raise self.fail(
                f"tensor {name!r} of shape {shape} does not divide into {stored.name} blocks of "
                f"{stored.block}."
            )
        if not possible(shape):
            raise self.fail(f"tensor {name!r} says it has the shape {shape}.")
        size = math.prod(shape) // stored.block * stored.size
        if start + size > self.size:
            raise self.fail(
                f"cut short: tensor {name!r} ends at byte {start + size}, the file at byte "
                f"{self.size}."
            )
        return TensorEntry(name, stored, shape, start, size)
