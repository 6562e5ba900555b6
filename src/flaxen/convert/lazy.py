"""Tensors that are not read yet: a shape, a dtype, and any box of them on demand.

A view never reads: it pushes the box that is asked of it back to boxes of its sources.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from flaxen.core.errors import CheckpointError

Box = tuple[slice, ...]
"""One concrete `slice(start, stop)` for each axis."""

ALIGNMENT = 64
"""Bytes; XLA takes a host buffer without copying it only if it starts at a multiple of this."""

LARGE = 1 << 20
"""Bytes from which an array gets pages of its own."""

STRIP = 16
"""Elements of a row that a transposing copy moves at a time: about a cache line."""


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a shape."""
    return tuple(slice(0, size) for size in shape)


def concrete(box: Sequence[slice], shape: Sequence[int]) -> Box:
    """The same box with every start and stop spelled out."""
    if len(box) != len(shape):
        raise IndexError(f"A box of {len(box)} slices cannot cut a tensor of shape {tuple(shape)}.")
    return tuple(
        slice(start, max(start, stop))
        for start, stop, _ in (s.indices(n) for s, n in zip(box, shape, strict=True))
    )


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """A fresh C-contiguous array that starts at a multiple of 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= LARGE:
        # NumPy would ask for huge pages, and clearing those can take longer than reading the file.
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def copy(out: np.ndarray, values: np.ndarray) -> None:
    """`np.copyto` to any dtype, faster where runs are contiguous in both arrays, and several times
    as fast where the fastest axes of the two differ.
    """
    if out.dtype == values.dtype:
        out, values = _in_runs(out, values)
    fast = _fastest(out)
    if out.nbytes < LARGE or fast == _fastest(values):
        np.copyto(out, values, casting="unsafe")
        return
    # Whole rows of `values`, so few that the lines of `out` they go to stay in the cache.
    for start in range(0, out.shape[fast], STRIP):
        strip = (*(slice(None),) * fast, slice(start, start + STRIP))
        np.copyto(out[strip], values[strip], casting="unsafe")


def _in_runs(out: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same memory, with each run that is contiguous in both arrays as one element."""
    axis, run = out.ndim, out.itemsize
    while axis and out.strides[axis - 1] == values.strides[axis - 1] == run:
        axis -= 1
        run *= out.shape[axis]
    if axis in (0, out.ndim) or not out.size:
        return out, values
    shape, piece = (*out.shape[:axis], run // out.itemsize), np.dtype((np.void, run))
    out, values = (a.reshape(shape, copy=False).view(piece) for a in (out, values))
    return out, values


def _fastest(array: np.ndarray) -> int:
    """The axis with neighbouring elements, among those long enough to matter."""
    strides = {abs(s): i for i, s in enumerate(array.strides) if array.shape[i] >= STRIP}
    return strides[min(strides)] if strides else 0


def is_float(dtype: np.dtype) -> bool:
    """Whether a conversion to another float type may touch this dtype."""
    if dtype.kind != "V":
        return dtype.kind == "f"
    try:
        return ml_dtypes.finfo(dtype) is not None
    except ValueError:
        return False


class ByteCounter:
    """How many bytes were asked of a file; several threads may add."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.total += nbytes


class Mapped(NamedTuple):
    """Memory that already holds a box, and who counts its bytes once they are used."""

    array: np.ndarray
    counter: ByteCounter


class LazyTensor:
    """A tensor of which any box can be read.

    Subclasses set `shape` and `dtype` and bring `fill`; those that can show their memory bring
    `mapped` too.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        """Write the values of `box` into `out`, which has the box's shape and any strides."""
        raise NotImplementedError

    def mapped(self, box: Box) -> Mapped | None:
        """The box as a strided array over existing memory, if there is one. Counts nothing."""
        return None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self, box: Sequence[slice] | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """The values of `box` (default: all), in `out` if given, else in a fresh aligned array."""
        where = whole(self.shape) if box is None else concrete(box, self.shape)
        shape = box_shape(where)
        if out is None:
            out = aligned_empty(shape, self.dtype)
        elif out.shape != shape or out.dtype != self.dtype:
            raise ValueError(
                f"Cannot read {self.dtype}{shape} into an array of {out.dtype}{out.shape}."
            )
        if out.size:
            self.fill(where, out)
        return out

    def view(self, box: Sequence[slice] | None = None) -> np.ndarray | None:
        """The box uncopied, if its memory is contiguous, aligned and never written; else None."""
        found = self.mapped(whole(self.shape) if box is None else concrete(box, self.shape))
        if found is None or not found.array.flags.c_contiguous:
            return None
        if found.array.ctypes.data % ALIGNMENT or found.array.flags.writeable:
            return None
        found.counter.add(found.array.nbytes)
        return found.array

    def reshape(self, shape: Sequence[int]) -> LazyTensor:
        from flaxen.convert.views import Reshaped

        return self if tuple(shape) == self.shape else Reshaped(self, tuple(shape))

    def permute(self, order: Sequence[int]) -> LazyTensor:
        """Axes in another order: axis `i` of the result is axis `order[i]` of this tensor."""
        from flaxen.convert.views import Permuted

        return self if list(order) == list(range(self.ndim)) else Permuted(self, tuple(order))

    def crop(self, box: Sequence[slice]) -> LazyTensor:
        from flaxen.convert.views import Cropped

        where = concrete(box, self.shape)
        return self if where == whole(self.shape) else Cropped(self, where)

    def astype(self, dtype: np.typing.DTypeLike) -> LazyTensor:
        from flaxen.convert.views import Converted

        kind = np.dtype(dtype)
        return self if kind == self.dtype else self.recast(kind) or Converted(self, kind)

    def recast(self, dtype: np.dtype) -> LazyTensor | None:
        """The tensor worked out in another dtype from the start, where nothing holds its values in
        this one; else None.
        """
        return None

    def map(
        self,
        function: Callable[[np.ndarray], np.ndarray],
        dtype: np.typing.DTypeLike | None = None,
    ) -> LazyTensor:
        """A function of each element, computed box by box; of the same dtype unless told.

        Reading raises:
            CheckpointError: the function fails, or gives another shape.
        """
        from flaxen.convert.views import Computed

        def compute(box: Box) -> np.ndarray:
            values = self.read(box)
            try:
                values = np.asarray(function(values))
            # Anything at all: the function is a user's.
            except Exception as error:
                raise CheckpointError(f"A function of {self} failed: {error!r}.") from error
            if values.shape != box_shape(box):
                raise CheckpointError(
                    f"A function of {self} gave {values.shape} for {box_shape(box)}; it must keep "
                    "the shape."
                )
            return values

        return Computed(self.shape, self.dtype if dtype is None else np.dtype(dtype), compute)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"


def concat(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Tensors one after another along an axis."""
    from flaxen.convert.views import Concatenated

    return parts[0] if len(parts) == 1 else Concatenated(tuple(parts), dim)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Equal tensors along a new leading axis."""
    from flaxen.convert.views import Stacked

    return Stacked(tuple(parts))
