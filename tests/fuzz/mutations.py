"""Ways to damage files: bytes, JSON values, and the parts of formats that hold numbers."""

from __future__ import annotations

import copy
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**32 - 1,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "7",
    "\ud800",
    "\0",
    "../x",
    "/etc/passwd",
    "a" * 5000,
    [],
    {},
    [[]],
    [1, 2],
    [-1, 2.5, "x"],
    [0, 2**62],
    [1] * 100,
    {"a": {}},
    "llama",
    "F16",
    "model.safetensors",
]
ODD_NAMES = ["..", ".", "", "a/b", "../model.safetensors", "/etc/passwd", "x\0y", "~", "n" * 300]
ODD_NAMES += ["\ud800", "model.safetensors ", "CON", "config.json", "a -> ../../b", "%2e%2e", "-"]
NUMBERS = [0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
OPCODES = (
    b".(0129NKMJGX\x8c\x8a)\x85\x86\x87t]ae}dsuqhrj\x94cRQbBCTUio\x81\x82\x84\x93P\x8f\x80\x95"
)


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
KEY = re.compile(rb"(?:general|tokenizer|split|llama|qwen3|gemma3)\.[a-z_.]+")
ODD_METADATA = [
    struct.pack("<IQ", 8, 0),
    struct.pack("<IQ", 8, 5) + b"llama",
    struct.pack("<IQ", 8, 4) + b"yarn",
    *(struct.pack("<Iq", 11, n) for n in (-1, 0, 1, 7, 2**40, 2**63 - 1)),
    struct.pack("<Ii", 5, -1),
    *(struct.pack("<If", 6, x) for x in (0.0, -1.0, 1e38, float("nan"), float("inf"))),
    struct.pack("<IB", 7, 1),
    struct.pack("<IIQ", 9, 4, 0),
    struct.pack("<IIQ2I", 9, 4, 2, 4, 4),
    struct.pack("<IIQ2I", 9, 4, 2, 4, 2),
    struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.0),
    struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 1) + b"a",
    struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 0),
]


def flip(raw: bytes, rng: Random) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if out:
            out[_place(out, rng)] = rng.choice([0, 255, rng.randrange(256), 1 << rng.randrange(8)])
    return bytes(out)


def truncate(raw: bytes, rng: Random) -> bytes:
    return raw[: _place(raw, rng)] if raw else raw


def splice(raw: bytes, rng: Random) -> bytes:
    """A piece of the file once more, elsewhere, over or between what stands there."""
    start, at = _place(raw, rng), _place(raw, rng)
    piece = raw[start : start + rng.choice([1, 4, 8, 24, 100])]
    return raw[:at] + piece + raw[at + rng.choice([0, len(piece)]) :]


def drop(raw: bytes, rng: Random) -> bytes:
    at = _place(raw, rng)
    return raw[:at] + raw[at + rng.choice([1, 4, 8, 64]) :]


def renumber(raw: bytes, rng: Random) -> bytes:
    """Another number where 2, 4 or 8 bytes stand."""
    form = rng.choice(["<H", "<I", "<I", "<Q", "<Q"])
    number = rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form))
    at = _place(raw, rng)
    return raw[:at] + struct.pack(form, number) + raw[at + struct.calcsize(form) :]


def noise(raw: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 8, 100, 3000]))


def _place(raw: bytes | bytearray, rng: Random) -> int:
    """Mostly near the ends, where headers and directories stand."""
    if not raw:
        return 0
    size = len(raw)
    near = rng.randrange(min(size, rng.choice([16, 200, 2000])))
    return rng.choice([near, near, size - 1 - near, rng.randrange(size)])


BYTES: list[Callable[[bytes, Random], bytes]] = [flip, truncate, splice, drop, renumber, renumber]


def damaged(raw: bytes, rng: Random) -> bytes:
    """A few changes of bytes; now and then, nothing but noise."""
    if rng.random() < 0.02:
        return noise(raw, rng)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        raw = rng.choice(BYTES)(raw, rng)
    return raw


def damaged_json(value: Any, rng: Random) -> bytes:
    """A few changes of values, and sometimes of the text."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        value = _change(value, rng)
    text = json.dumps(value)
    kind = rng.random()
    if kind < 0.05:
        text = _twice(text, rng)
    elif kind < 0.08:
        text = text.replace(rng.choice("0123456789"), "9" * rng.choice([400, 5000]), 1)
    elif kind < 0.11:
        deep = rng.choice([50, 900, 100_000])
        text = text.replace(": ", ': {"a": ' + "[" * deep + "]" * deep + "}, : ", 1)
    elif kind < 0.14:
        text = '{"a":' * (deep := rng.choice([50, 900, 100_000])) + "1" + "}" * deep
    raw = text.encode("utf-8", "surrogatepass")
    return damaged(raw, rng) if rng.random() < 0.2 else raw


def _change(value: Any, rng: Random) -> Any:
    """The value with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[str(rng.choice([*ODD_NAMES, *value]))] = value[key]
            case 2:
                value[key] = copy.deepcopy(value[rng.choice(list(value))])
            case _:
                value[key] = _change(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                del value[at]
            case 1:
                value += value * rng.choice([1, 1, 100])
            case _:
                value[at] = _change(value[at], rng)
        return value
    if type(value) is int and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 10**9, str(value)])
    if isinstance(value, str) and rng.random() < 0.3:
        return rng.choice(ODD_NAMES)
    return copy.deepcopy(rng.choice(ODD_VALUES))


def _twice(text: str, rng: Random) -> str:
    """The object with one of its keys written once more."""
    body = json.loads(text)
    if not isinstance(body, dict) or not body:
        return text
    key = rng.choice(list(body))
    again = json.dumps({key: rng.choice([body[key], None, 5])})[1:-1]
    return "{" + again + ", " + text[1:]


def damaged_header(raw: bytes, rng: Random) -> bytes:
    """A safetensors file with a changed header whose length is right."""
    length = int.from_bytes(raw[:8], "little")
    header = damaged_json(json.loads(raw[8 : 8 + length]), rng)
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def damaged_metadata(raw: bytes, rng: Random) -> bytes:
    """A GGUF file in which keys have values of other types and sizes."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        keys = [m for m in KEY.finditer(raw) if m.start() == 0 or raw[m.start() - 8] == len(m[0])]
        if not keys:
            return raw
        at = rng.choice(keys).end()
        size = _value_size(raw, at)
        value = rng.choice(ODD_METADATA)
        raw = raw[:at] + value + raw[at + size :]
        # The data keep their place in units of the alignment.
        raw += bytes((size - len(value)) % 32)
    return raw


def _value_size(raw: bytes, at: int) -> int:
    """The bytes of a type and a value: numbers, text, or an array of numbers."""
    kind, length = struct.unpack_from("<IQ", raw, at)
    if kind == 8:
        return 12 + length
    if kind == 9:
        kind, length = struct.unpack_from("<IQ", raw, at + 4)
        return 16 + length * SIZES.get(kind, 0)
    return 4 + SIZES.get(kind, 0)


def damaged_pickle(raw: bytes, rng: Random) -> bytes:
    """A pickle with a few other instructions and numbers."""
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 6])):
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                out[at] = rng.choice(OPCODES)
            case 1:
                out[at:at] = bytes([rng.choice(OPCODES)])
            case 2:
                out = bytearray(damaged(bytes(out), rng)) or bytearray(b".")
            case _:
                numbers = [i for i, b in enumerate(out[:-5]) if b in b"JK"]
                place = rng.choice(numbers) + 1 if numbers else at
                out[place : place + 4] = struct.pack("<i", rng.choice([-1, 0, 1, 5, 2**31 - 1]))
    return bytes(out)


def damaged_archive(raw: bytes, rng: Random) -> bytes:
    """A zip file, sound as such, with a changed pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            entry = old.read(name)
            if name.endswith("data.pkl"):
                entry = damaged_pickle(entry, rng)
            elif rng.random() < 0.05:
                entry = damaged(entry, rng)
            new.writestr(name, entry)
    return out.getvalue()
