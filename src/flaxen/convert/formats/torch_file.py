"""Files of torch.save: state dicts in zip files (since PyTorch 1.6) and in the streams before.

Nothing in them is executed: torch_pickle.py reads their pickles as data, the tensors are boxes of a
mapped file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.formats.folder import open_folder
from flaxen.convert.formats.foreign import foreign
from flaxen.convert.formats.source import Entry, FileMap, FileTensor, possible
from flaxen.convert.formats.stored_zip import Part, stored_parts
from flaxen.convert.formats.torch_names import Storage, Stored
from flaxen.convert.formats.torch_pickle import MAX_BYTES, read_pickle
from flaxen.convert.lazy import Box, LazyTensor, Mapped
from flaxen.core.errors import CheckpointError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
WRAPPERS = ("state_dict", "model")
MAGIC = 0x1950A86A20F9469CFC6C
EXPANDED = 1 << 24
"""Bytes that a tensor of repeated values may show, whatever the size of its file."""


class StridedTensor(LazyTensor):
    """A tensor in a mapped file with strides of its own, or of the other byte order."""

    def __init__(
        self, source: FileMap, entry: Entry, strides: tuple[int, ...], swapped: bool = False
    ):
        self.source, self.start, self.swapped = source, entry.start, swapped
        self.dtype, self.shape, self.strides = entry.dtype, entry.shape, strides

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.source.counter.add(out.nbytes)
        np.copyto(out, self._array()[(*box, ...)])
        if self.swapped:
            out.byteswap(inplace=True)

    def mapped(self, box: Box) -> Mapped | None:
        if self.swapped:
            return None
        return Mapped(self._array()[(*box, ...)], self.source.counter)

    def _array(self) -> np.ndarray:
        size = self.dtype.itemsize
        return np.ndarray(
            self.shape,
            self.dtype,
            self.source.memory,
            self.start,
            tuple(n * size for n in self.strides),
        )


def open_torch(path: Path) -> Checkpoint:
    """Open a `.bin`, `.pt` or `.pth` file, or a folder with pytorch_model.bin or its shards.

    Raises:
        CheckpointError: a file is absent, damaged, or holds anything but a state dict.
    """
    return open_folder(path, "torch", SINGLE, INDEX, _tensors)


def _tensors(source: FileMap) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    start = source.memory[:300].tobytes()
    if start.startswith(b"PK\3\4"):
        return _from_zip(source), {}
    if start.startswith(b"\x80"):
        return _from_stream(source), {}
    if start[257:262] == b"ustar":
        raise CheckpointError(
            f"{source.path} is a tar file of PyTorch before 0.1.10, which cannot be read. "
            "Load it with PyTorch and save its state dict again."
        )
    told = foreign([source.path.name]) or " Fetch or write it again."
    raise CheckpointError(
        f"{source.path} is no file of torch.save: it begins with {start[:8]!r}.{told}"
    )


def _from_zip(source: FileMap) -> dict[str, LazyTensor]:
    parts = stored_parts(source.path, source.memory)
    roots = [name.removesuffix("data.pkl") for name in parts if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise _damaged(source, f"{len(roots)} entries are called data.pkl, expected one")
    root = roots[0]
    if f"{root}constants.pkl" in parts:
        raise CheckpointError(
            f"{source.path} is a TorchScript program; expected a state dict. "
            "Save the state dict of the model it was made of."
        )
    if packed := [name for name, part in parts.items() if not part.plain]:
        raise CheckpointError(
            f"{source.path}: its entry {packed[0]!r} is compressed or encrypted; PyTorch stores "
            "entries as they are. Write the file with torch.save."
        )
    pickle, order = parts[f"{root}data.pkl"], parts.get(f"{root}byteorder", Part(0, 0))
    found = read_pickle(_bytes(source, pickle), 0, str(source.path)).value
    swapped = _bytes(source, order) == b"big"
    return {
        name: _tensor(source, name, stored, parts.get(f"{root}data/{stored.storage.key}"), swapped)
        for name, stored in _state_dict(source, found).items()
    }


def _bytes(source: FileMap, part: Part) -> bytes:
    if part.size > MAX_BYTES:
        raise _damaged(source, f"its pickle has {part.size} bytes; the most is {MAX_BYTES}")
    return source.memory[part.start : part.start + part.size].tobytes()


def _from_stream(source: FileMap) -> dict[str, LazyTensor]:
    """Pickles (magic number, version, system, state dict, storage keys), then the storages."""
    data, where, at, pickles = source.memory[:MAX_BYTES].tobytes(), str(source.path), 0, []
    for _ in range(5):
        pickles.append(read_pickle(data, at, where))
        at = pickles[-1].stop
        if pickles[0].value != MAGIC:
            raise CheckpointError(
                f"{where} is a pickle, but none of torch.save; expected a state dict. "
                "Save the state dict with torch.save or, better, as safetensors."
            )
    *_, state, keys = pickles
    parts = _in_a_row(source, keys.value, state.storages, at)
    return {
        name: _tensor(source, name, stored, parts.get(stored.storage.key), swapped=False)
        for name, stored in _state_dict(source, state.value).items()
    }


def _in_a_row(source: FileMap, keys: Any, storages: dict[str, Storage], at: int) -> dict[str, Part]:
    """Each storage stands behind its count, one after another."""
    parts: dict[str, Part] = {}
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _damaged(source, "its list of storages is none")
    for key in keys:
        storage = storages.get(key)
        if storage is None or key in parts:
            raise _damaged(source, "its list of storages is not that of its tensors")
        count = int.from_bytes(source.memory[at : at + 8].tobytes(), "little")
        if count != storage.count:
            raise _damaged(source, f"a storage has {count} values, expected {storage.count}")
        parts[key] = Part(at + 8, storage.nbytes)
        at += 8 + storage.nbytes
    return parts


def _state_dict(source: FileMap, found: Any) -> dict[str, Stored]:
    """The tensors of a file: a flat dictionary, bare or under one of the usual names."""
    wrapped = [
        name for name in WRAPPERS if isinstance(found, dict) and type(found.get(name)) is dict
    ]
    inner = found[wrapped[0]] if len(wrapped) == 1 else found
    if type(inner) is dict and inner:
        odd = [k for k, v in inner.items() if type(k) is not str or not isinstance(v, Stored)]
        if not odd:
            return inner
        kinds = [f"{str(k)[:80]!r} ({type(inner[k]).__name__})" for k in odd[:8]]
        what = f"a dictionary where {', '.join(kinds)} are no tensors"
    else:
        kind = "tensor" if isinstance(inner, Stored) else type(inner).__name__
        what = "an empty dictionary" if inner == {} else f"a {kind} alone"
    raise CheckpointError(
        f"{source.path} holds {what}; expected a flat state dict, bare or under "
        f"{' or '.join(map(repr, WRAPPERS))}. Save the state dict alone."
    )


def _tensor(
    source: FileMap, name: str, stored: Stored, part: Part | None, swapped: bool
) -> LazyTensor:
    """The tensor, once it has proved to lie within its storage, and that within the file."""
    size, storage = stored.dtype.itemsize, stored.storage
    if part is None or part.size != storage.nbytes or part.start + part.size > source.memory.size:
        raise _damaged(source, f"the {storage.nbytes} bytes of {name!r} are not there in full")
    if not possible(stored.shape):
        raise _damaged(source, f"{name!r} says it has the shape {stored.shape}")
    regular = _contiguous(stored.shape)
    if 0 in stored.shape:
        return FileTensor(source, Entry(stored.dtype, stored.shape, part.start))
    # The step along an axis of one place is never taken, so a file may say anything of it.
    own = zip(stored.shape, stored.strides, regular, strict=True)
    strides = tuple(even if n == 1 else step for n, step, even in own)
    steps = zip(stored.shape, strides, strict=True)
    last = stored.offset + sum((n - 1) * step for n, step in steps)
    if (last + 1) * size > part.size:
        raise _damaged(source, f"{name!r} reaches beyond its {part.size} bytes")
    if math.prod(stored.shape) * size > max(EXPANDED, source.memory.size):
        raise _damaged(source, f"{name!r} of shape {stored.shape} is larger than the whole file")
    start = part.start + stored.offset * size
    if strides == regular and not swapped:
        return FileTensor(source, Entry(stored.dtype, stored.shape, start))
    return StridedTensor(source, Entry(stored.dtype, stored.shape, start), strides, swapped)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _damaged(source: FileMap, why: str) -> CheckpointError:
    return CheckpointError(
        f"{source.path} is damaged or incomplete: {why}. Fetch or write it again."
    )
