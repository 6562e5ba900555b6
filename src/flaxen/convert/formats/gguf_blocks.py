"""Values of quantised GGUF tensors, read a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flaxen.convert.formats.gguf_file import TensorEntry
from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, Mapped
from flaxen.core.errors import CheckpointError

CHUNK = 1 << 17
"""Values made at once: what stays in a core's cache."""


class StoredTensor(LazyTensor):
    """A tensor that lies in the file as it is."""

    def __init__(
        self, entry: TensorEntry, dtype: np.dtype, buffer: np.ndarray, counter: ByteCounter
    ):
        self.shape, self.dtype, self.counter = entry.shape, dtype, counter
        raw = buffer[entry.start : entry.start + entry.bytes]
        self.array = raw.view(dtype).reshape(entry.shape)

    def fill(self, box: Box, out: np.ndarray) -> None:
        np.copyto(out, self.array[box])
        self.counter.add(out.nbytes)

    def mapped(self, box: Box) -> Mapped | None:
        return Mapped(self.array[box], self.counter)


class BlockTensor(LazyTensor):
    """A quantised tensor, shown in float32: blocks of values along its last axis."""

    dtype = np.dtype(np.float32)

    def __init__(self, entry: TensorEntry, buffer: np.ndarray, counter: ByteCounter):
        self.shape, self.kind, self.counter = entry.shape, entry.type, counter
        *outer, inner = entry.shape
        self.blocks = buffer[entry.start : entry.start + entry.bytes].reshape(
            *outer, inner // self.kind.block, self.kind.size
        )
        self.values = block_values(self.kind.name)

    def fill(self, box: Box, out: np.ndarray) -> None:
        *outer, inner = box
        size = self.kind.block
        first, last = inner.start // size, -(-inner.stop // size)
        blocks = self.blocks[(*outer, slice(first, last))]
        cut = slice(inner.start - first * size, inner.stop - first * size)
        self.counter.add(blocks.size)
        if not outer:
            blocks, out = blocks[None], out[None]
        # Scales may be no numbers; the values then are none either, and that is no event here.
        with np.errstate(invalid="ignore", over="ignore"):
            for index in np.ndindex(out.shape[:-2]):
                self._rows(blocks[index], cut, out[index])

    def _rows(self, blocks: np.ndarray, cut: slice, out: np.ndarray) -> None:
        rows, per_row, size = blocks.shape
        step = max(1, CHUNK // (per_row * self.kind.block))
        for at in range(0, rows, step):
            values = self.values(blocks[at : at + step].reshape(-1, size))
            out[at : at + step] = values.reshape(-1, per_row * self.kind.block)[:, cut]


class PlusConstant(LazyTensor):
    """A tensor with a number added to each value."""

    def __init__(self, parent: LazyTensor, constant: float):
        self.parent, self.constant = parent, constant
        self.shape, self.dtype = parent.shape, parent.dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.parent.fill(box, out)
        out += self.dtype.type(self.constant)


Values = Callable[[np.ndarray], np.ndarray]


def block_values(kind: str) -> Values:
    """What turns stored blocks (n, bytes of a block) into values (n, values of a block).

    The plainest formats are written out here, several times as fast as the gguf package, which
    does the others.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise CheckpointError(
            f"{kind} tensors of a GGUF file need the gguf package: pip install 'flaxen[gguf]'."
        ) from error
    number = GGMLQuantizationType[kind]
    # One long row: the package would cut many rows into pieces too small to be fast.
    return lambda blocks: dequantize(blocks.reshape(1, -1), number).reshape(len(blocks), -1)


def _half(column: np.ndarray) -> np.ndarray:
    return column.copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(n, k) bytes to (n, 2k) numbers 0..15: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)) * _half(blocks[:, :2])


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 4:]) * _half(blocks[:, :2])
    values += _half(blocks[:, 2:4])
    return values


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _half(blocks[:, :2])


_PLAIN: dict[str, Values] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
