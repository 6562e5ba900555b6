"""The pickles in PyTorch files, read as data.

A pickle is a program for a stack machine. This one has the few instructions that build plain
containers and tensors; it imports nothing and calls nothing that the file names.
Format: Python's pickletools, protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from flaxen.convert.formats.torch_names import Refused, Storage, call, key, named, storage_of
from flaxen.core.errors import CheckpointError

MAX_BYTES = 1 << 26
MAX_LINE = 1000
MAX_STEPS = 4_000_000
"""Some 40 instructions build one tensor; each makes at most one small object."""


class Pickle(NamedTuple):
    """What a pickle holds, the storages it speaks of, and the position behind it."""

    value: Any
    storages: dict[str, Storage]
    stop: int


def read_pickle(data: bytes, at: int, where: str) -> Pickle:
    """The pickle at a position.

    Raises:
        CheckpointError: it is damaged, or asks for anything but tensors.
    """
    machine = _Machine(data, at)
    try:
        return Pickle(machine.run(), machine.storages, machine.at)
    except Refused as error:
        raise CheckpointError(
            f"{where} {error}; expected only tensors in plain dictionaries. Nothing in it was "
            "executed. Save the state dict alone, as safetensors, with the program that wrote it."
        ) from error
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{where} is damaged or incomplete: its pickle cannot be followed at byte "
            f"{machine.at}. Fetch or write it again."
        ) from error


class _Machine:
    """A stack, the stacks below its marks, and a memo of what was built."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}
        self.left = MAX_STEPS

    def run(self) -> Any:
        while self.left > 0:
            self.left -= 1
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            if code not in ACTIONS:
                raise Refused(f"uses the pickle instruction {_instruction(code)}")
            ACTIONS[code](self)
        raise Refused(f"has a pickle of more than {MAX_STEPS} instructions")

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise IndexError
        self.at += count
        return found

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        stop = self.data.find(b"\n", self.at, self.at + MAX_LINE)
        if stop < 0:
            raise IndexError
        return self.take(stop + 1 - self.at)[:-1].decode("utf-8")

    def marked(self) -> list[Any]:
        """What was pushed since the last mark."""
        found, self.stack = self.stack, self.below.pop()
        return found

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused("appends to something else than a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise Refused("sets items of something else than a dictionary")
        self.stack[-1].update(_pairs(items))

    def reduce(self) -> None:
        """Call a function; a long argument costs as many steps, since it may come again."""
        function, arguments = self.last(2)
        if isinstance(arguments, tuple):
            sizes = (len(x) for x in arguments if isinstance(x, list | tuple))
            self.left -= len(arguments) + sum(sizes)
        self.push(call(function, arguments))

    def refer(self) -> None:
        storage = storage_of(self.stack.pop())
        self.push(self.storages.setdefault(storage.key, storage))

    def build(self) -> None:
        """Give an object its attributes: those of an OrderedDict (`_metadata`) are left out."""
        target, state = self.last(2)
        if type(target) is not dict or type(state) is not dict:
            raise Refused("sets attributes of something else than a dictionary")
        self.push(target)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise IndexError
    return {key(name): value for name, value in zip(items[::2], items[1::2], strict=True)}


def _instruction(code: bytes) -> str:
    known = {op.code.encode("latin-1"): op.name for op in pickletools.opcodes}
    return known.get(code, repr(code))


def _number(form: str) -> Callable[[_Machine], None]:
    layout = struct.Struct(form)
    return lambda m: m.push(m.number(layout))


def _counted(form: str, decode: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Bytes behind their number."""
    layout = struct.Struct(form)
    return lambda m: m.push(decode(m.take(m.number(layout))))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.push(value)


def _keep(form: str) -> Callable[[_Machine], None]:
    layout = struct.Struct(form)
    return lambda m: m.memo.__setitem__(m.number(layout), m.stack[-1])


def _again(form: str) -> Callable[[_Machine], None]:
    layout = struct.Struct(form)
    return lambda m: m.push(_kept(m, m.number(layout)))


def _kept(machine: _Machine, number: int) -> Any:
    if number not in machine.memo:
        raise IndexError
    return machine.memo[number]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8")


def _integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


ACTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # PROTO
    b"\x95": lambda m: m.take(8),  # FRAME
    b"(": _Machine.mark,
    b"0": lambda m: m.stack.pop(),
    b"1": _Machine.marked,
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"J": _number("<i"),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"G": _number(">d"),
    b"\x8a": _counted("<B", _integer),  # LONG1
    b"X": _counted("<I", _text),
    b"\x8c": _counted("<B", _text),
    b"\x8d": _counted("<Q", _text),
    b"T": _counted("<I", _text),  # strings of Python 2
    b"U": _counted("<B", _text),
    b"B": _counted("<I", bytes),
    b"C": _counted("<B", bytes),
    b"\x8e": _counted("<Q", bytes),
    b")": _constant(()),
    b"\x85": lambda m: m.push(m.last(1)),
    b"\x86": lambda m: m.push(m.last(2)),
    b"\x87": lambda m: m.push(m.last(3)),
    b"t": lambda m: m.push(tuple(m.marked())),
    b"]": lambda m: m.push([]),
    b"l": lambda m: m.push(m.marked()),
    b"a": lambda m: m.extend(list(m.last(1))),
    b"e": lambda m: m.extend(m.marked()),
    b"}": lambda m: m.push({}),
    b"d": lambda m: m.push(_pairs(m.marked())),
    b"s": lambda m: m.update(list(m.last(2))),
    b"u": lambda m: m.update(m.marked()),
    b"q": _keep("<B"),
    b"r": _keep("<I"),
    b"\x94": lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    b"h": _again("<B"),
    b"j": _again("<I"),
    b"c": lambda m: m.push(named(m.line(), m.line())),
    b"\x93": lambda m: m.push(named(*m.last(2))),  # STACK_GLOBAL
    b"R": _Machine.reduce,
    b"Q": _Machine.refer,
    b"b": _Machine.build,
}
