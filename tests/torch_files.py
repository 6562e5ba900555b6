"""Files as torch.save writes them, put together by hand: zip archives and their pickles."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

KINDS = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int8": "Char",
    "uint8": "Byte",
}


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def counts(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def storage(key: str, kind: str, count: int) -> bytes:
    told = text("storage") + name("torch", f"{kind}Storage") + text(key) + text("cpu")
    return b"(" + told + number(count) + b"tQ"


def tensor(
    stored: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> bytes:
    hooks = name("collections", "OrderedDict") + b")R"
    arguments = stored + number(offset) + counts(shape) + counts(strides) + b"\x89" + hooks
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def table(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def archive(path: Path, pickle: bytes, storages: Mapping[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        for key, raw in (storages or {}).items():
            file.writestr(f"archive/data/{key}", raw)
    return path


def save(arrays: Mapping[str, np.ndarray], path: Path) -> Path:
    """A state dict of contiguous arrays, as torch.save would write it."""
    items = {}
    for i, (key, array) in enumerate(arrays.items()):
        stored = storage(str(i), KINDS[array.dtype.name], array.size)
        strides = tuple(n // array.itemsize for n in np.ascontiguousarray(array).strides)
        items[key] = tensor(stored, array.shape, strides[: array.ndim])
    storages = {str(i): array.tobytes() for i, array in enumerate(arrays.values())}
    return archive(path, pickled(table(items)), storages)
