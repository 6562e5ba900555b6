"""The header of a GGUF file, as bytes.

Source: the GGUF specification, version 3 (little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flaxen.convert.formats.gguf_file import ARRAY, SCALARS, STRING, TYPES

ALIGNMENT = 32
"""Bytes: each tensor starts at a multiple of this, counted from where the data starts."""

_NUMBERS = {np.dtype(form): kind for kind, form in SCALARS.items()}
_TYPES = {stored.name: number for number, stored in TYPES.items()}
_U32, _I64, _F32, _BOOL = 4, 11, 6, 7


def padding(size: int) -> int:
    """Bytes up to the next multiple of the alignment."""
    return -size % ALIGNMENT


def header(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int], int]]
) -> bytes:
    """Everything before the data; `tensors` are name -> (type, shape in numpy order, bytes).

    Values are strings, bools, numbers (whole ones as uint32, others as float32), arrays of numbers
    (kept in their type) and lists.
    """
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(value)
        parts += [_string(key), struct.pack("<I", kind), data]
    at = 0
    for name, (kind, shape, size) in tensors.items():
        parts += [_string(name), struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        parts.append(struct.pack("<IQ", _TYPES[kind], at))
        at += size + padding(size)
    raw = b"".join(parts)
    return raw + b"\0" * padding(len(raw))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """A value's type number and its bytes."""
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        kind = _U32 if 0 <= value < 1 << 32 else _I64
        return kind, struct.pack(SCALARS[kind], value)
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    if isinstance(value, np.ndarray):
        return ARRAY, struct.pack("<IQ", _NUMBERS[value.dtype], value.size) + value.tobytes()
    items = [_value(item) for item in value]
    kind = items[0][0] if items else STRING
    return ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(data for _, data in items)
