"""From lazy tensors to arrays on devices: each byte is read once, to where it stays."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from flaxen.core.platform import platform

SLAB = 16 << 20
"""Bytes that one thread reads at a time."""

AHEAD = 256 << 20
"""Bytes that may be on their way beside the tensor that is waited for."""

_SYSTEM = ctypes.CDLL(None)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


Bounds = tuple[tuple[int | None, int | None], ...]
"""Start and stop along each axis: a box that can be a key."""


class Cut(NamedTuple):
    """The boxes that the devices of this process hold of a tensor.

    `part_of` leads from what jax calls a box, where None is an end, to its place in `boxes`.
    """

    boxes: list[Box]
    on_cpu: list[bool]
    part_of: dict[Bounds, int]


class Planned(NamedTuple):
    """A tensor whose parts, each one box of it, have their place in host memory.

    `jobs` are the boxes still to be read and where to; what a view gives needs none.
    """

    tensor: LazyTensor
    sharding: Sharding
    parts: list[np.ndarray]
    jobs: list[tuple[Box, np.ndarray]]


class Pending(NamedTuple):
    """A tensor whose parts are being read."""

    planned: Planned
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
    plans = (_plan(_cast(t, dtype), s) for t, s in zip(leaves, where, strict=True))
    if platform() == "cpu":
        # What stays is reserved before any of it is filled: reserving waits for whoever fills.
        plans = iter(list(plans))
    arrays: list[jax.Array] = []
    pending: deque[Pending] = deque()
    on_the_way = 0
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "flaxen-read")
    try:
        for planned in plans:
            pending.append(_start(pool, planned))
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


def _plan(tensor: LazyTensor, sharding: Sharding) -> Planned:
    parts, jobs, cut = [], [], _cut(sharding, tensor.shape)
    for box, on_cpu in zip(cut.boxes, cut.on_cpu, strict=True):
        values = tensor.view(box) if on_cpu else None
        if values is None:
            values = aligned_empty(box_shape(box), tensor.dtype)
            for slab, inside in slabs(box, tensor.dtype.itemsize, SLAB):
                jobs.append((slab, values[(*inside, ...)]))
        parts.append(values)
    # In the order of the file, whosever they are: what devices share there is near in time too.
    jobs.sort(key=lambda job: [part.start for part in job[0]])
    return Planned(tensor, sharding, parts, jobs)


def _start(pool: ThreadPoolExecutor, planned: Planned) -> Pending:
    reads = [
        (pool.submit(_read, planned.tensor, slab, out), out.nbytes) for slab, out in planned.jobs
    ]
    return Pending(planned, reads, sum(nbytes for _, nbytes in reads))


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


@functools.lru_cache(maxsize=256)
def _cut(sharding: Sharding, shape: tuple[int, ...]) -> Cut:
    """The layers of a model are cut alike: worked out once for all of them."""
    found = list(boxes(sharding, shape))
    where = {bounds(box): i for i, (box, _) in enumerate(found)}
    asked = [index or () for index in sharding.addressable_devices_indices_map(shape).values()]
    part_of = {bounds(index): where[bounds(concrete(index, shape))] for index in asked}
    on_cpu = [devices[0].platform == "cpu" for _, devices in found]
    return Cut([box for box, _ in found], on_cpu, part_of)


def bounds(box: Sequence[slice]) -> Bounds:
    return tuple((s.start, s.stop) for s in box)


def _finish(pending: Pending, progress: Callable[[int], None] | None) -> jax.Array:
    tensor, sharding, parts, _ = pending.planned
    for future, nbytes in pending.reads:
        future.result()
        if progress is not None:
            progress(nbytes)
    if progress is not None and not pending.reads:
        progress(sum(values.nbytes for values in parts))

    part_of = _cut(sharding, tensor.shape).part_of

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return parts[part_of[bounds(index or ())]]

    # All devices at once: on CPU the array takes the memory as it is.
    array = jax.make_array_from_callback(tensor.shape, sharding, part)
    # On an accelerator the host buffer must be gone before more are filled.
    return array.block_until_ready()
