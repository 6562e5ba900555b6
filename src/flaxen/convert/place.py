"""From lazy tensors to arrays on devices: each byte is read once, to where it stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from flaxen.convert.lazy import (
    LARGE,
    Box,
    LazyTensor,
    aligned_empty,
    box_shape,
    concrete,
    is_float,
)
from flaxen.convert.views import slabs

SLAB = 16 << 20
"""Bytes that one thread reads at a time."""

AHEAD = 256 << 20
"""Bytes that may be on their way beside the tensor that is waited for."""

_SYSTEM = ctypes.CDLL(None)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each axis: a box that can be a key."""


class Pending(NamedTuple):
    """A tensor whose parts, each one box of it in host memory, are being read."""

    shape: tuple[int, ...]
    sharding: Sharding
    parts: dict[Bounds, np.ndarray]
    reads: list[tuple[Future[None], int]]
    nbytes: int


def place(
    lazies: Any,
    shardings: Any = None,
    dtype: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Arrays in place of the lazy tensors of a tree.

    shardings: the same tree of `jax.sharding.Sharding`; None, anywhere, is the default device.
    dtype: what floats are converted to; integers and booleans keep theirs.
    progress: called with the number of bytes that have arrived since the last call.

    On CPU the memory read into is the array's own; data that lies aligned in a mapped file is not
    even copied. Several threads read; only the boxes of this process's devices are read.
    """
    leaves, structure = jax.tree.flatten(lazies)
    where = _leaf_shardings(shardings, len(leaves))
    arrays: list[jax.Array] = []
    pending: deque[Pending] = deque()
    on_the_way = 0
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "flaxen-read")
    try:
        for tensor, sharding in zip(leaves, where, strict=True):
            pending.append(_start(pool, _cast(tensor, dtype), sharding))
            on_the_way += pending[-1].nbytes
            while on_the_way > AHEAD + pending[0].nbytes:
                on_the_way -= pending[0].nbytes
                arrays.append(_finish(pending.popleft(), progress))
        arrays += [_finish(p, progress) for p in pending]
    finally:
        pool.shutdown(cancel_futures=True)
    return jax.tree.unflatten(structure, arrays)


def _leaf_shardings(shardings: Any, count: int) -> list[Sharding]:
    default = jax.device_put(0).sharding
    if shardings is None:
        return [default] * count
    return [s or default for s in jax.tree.leaves(shardings, is_leaf=lambda s: s is None)]


def _cast(tensor: LazyTensor, dtype: Any) -> LazyTensor:
    return tensor.astype(dtype) if dtype is not None and is_float(tensor.dtype) else tensor


def _start(pool: ThreadPoolExecutor, tensor: LazyTensor, sharding: Sharding) -> Pending:
    parts, jobs = {}, []
    for box, devices in boxes(sharding, tensor.shape):
        values = tensor.view(box) if devices[0].platform == "cpu" else None
        if values is None:
            values = aligned_empty(box_shape(box), tensor.dtype)
            for slab, inside in slabs(box, tensor.dtype.itemsize, SLAB):
                jobs.append((slab, values[(*inside, ...)]))
        parts[bounds(box)] = values
    # In the order of the file, whosever they are: what devices share there is near in time too.
    jobs.sort(key=lambda job: [part.start for part in job[0]])
    reads = [(pool.submit(_read, tensor, slab, out), out.nbytes) for slab, out in jobs]
    fresh = sum(nbytes for _, nbytes in reads)
    return Pending(tensor.shape, sharding, parts, reads, fresh)


def _read(tensor: LazyTensor, box: Box, target: np.ndarray) -> None:
    _provide(target)
    tensor.read(box, target)


def _provide(target: np.ndarray) -> None:
    """Let the system find the pages of fresh memory in one call: a fault for each costs more than
    copying into it.
    """
    if sys.platform == "linux" and target.nbytes >= LARGE:
        start = target.ctypes.data & -mmap.PAGESIZE
        length = target.ctypes.data + target.nbytes - start
        # Older kernels refuse, and the pages come one by one.
        _SYSTEM.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


def boxes(sharding: Sharding, shape: tuple[int, ...]) -> Iterator[tuple[Box, list[Any]]]:
    """Each different box that devices of this process hold, and those devices."""
    found: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(bounds(concrete(index or (), shape)), []).append(device)
    for pairs, devices in found.items():
        yield tuple(slice(*pair) for pair in pairs), devices


def bounds(box: Box) -> Bounds:
    return tuple((s.start, s.stop) for s in box)


def _finish(pending: Pending, progress: Callable[[int], None] | None) -> jax.Array:
    for future, nbytes in pending.reads:
        future.result()
        if progress is not None:
            progress(nbytes)
    if progress is not None and not pending.reads:
        progress(sum(values.nbytes for values in pending.parts.values()))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return pending.parts[bounds(concrete(index or (), pending.shape))]

    # All devices at once: on CPU the array takes the memory as it is.
    array = jax.make_array_from_callback(pending.shape, pending.sharding, part)
    # On an accelerator the host buffer must be gone before more are filled.
    return array.block_until_ready()
