"""What a PyTorch file may name, and what each name stands for here.

Nothing is looked up in any module: a name is a key of a table, or it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.convert.formats.source import MAX_AXES


@dataclass(frozen=True, slots=True)
class Name:
    """A name that a file asks for and this reader knows."""

    text: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of stored values; without a dtype, of bytes."""

    key: str
    dtype: np.dtype | None
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * (self.dtype.itemsize if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a storage; offset and strides count elements."""

    storage: Storage
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Refused(Exception):
    """What is asked for is not the rebuilding of a tensor."""


DTYPES: dict[str, np.dtype] = {
    f"torch.{name}": np.dtype(kind)
    for name, kind in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
        "int64": np.int64,
        "int32": np.int32,
        "int16": np.int16,
        "int8": np.int8,
        "uint64": np.uint64,
        "uint32": np.uint32,
        "uint16": np.uint16,
        "uint8": np.uint8,
        "bool": np.bool_,
        "complex64": np.complex64,
        "complex128": np.complex128,
    }.items()
}

STORAGES: dict[str, np.dtype | None] = {
    f"torch.{name}Storage": np.dtype(kind)
    for name, kind in {
        "Double": np.float64,
        "Float": np.float32,
        "Half": np.float16,
        "BFloat16": ml_dtypes.bfloat16,
        "Long": np.int64,
        "Int": np.int32,
        "Short": np.int16,
        "Char": np.int8,
        "Byte": np.uint8,
        "Bool": np.bool_,
        "ComplexFloat": np.complex64,
        "ComplexDouble": np.complex128,
    }.items()
} | {"torch.storage.UntypedStorage": None, "torch.storage._UntypedStorage": None}


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    """An OrderedDict; a pickle of Python 2 hands its items over as lists of two."""
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise Refused("makes an OrderedDict of something else than pairs")
    return {key(name): value for name, value in pairs}


def key(value: Any) -> str | int:
    """A key of a dictionary: tables of names, or of small numbers."""
    if type(value) is str or (type(value) is int and abs(value) < 2**31):
        return value
    raise Refused(f"has a dictionary key of type {type(value).__name__}")


def _v1(storage: Any, offset: Any, shape: Any, strides: Any) -> Stored:
    return _v3(storage, offset, shape, strides, False, None, None)


def _v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    gradients: Any,
    hooks: Any,
    marks: Any = None,
) -> Stored:
    return _v3(storage, offset, shape, strides, gradients, hooks, None, marks)


def _v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _gradients: Any,
    _hooks: Any,
    dtype: Any,
    marks: Any = None,
) -> Stored:
    if marks:
        raise Refused("holds a tensor with marks such as conj, a view that computes its values")
    if not isinstance(storage, Storage) or not _counts((offset,)):
        raise Refused("rebuilds a tensor of something else than a storage and an offset")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise Refused("rebuilds a tensor whose sizes and strides are no tuples")
    if len(shape) != len(strides) or not _counts(shape) or not _counts(strides):
        raise Refused("rebuilds a tensor whose sizes and strides are no counts, one for each axis")
    kind = storage.dtype if dtype is None else _dtype(dtype)
    if kind is None:
        raise Refused("rebuilds a tensor of unknown dtype")
    return Stored(storage, kind, shape, strides, offset)


def _dtype(name: Any) -> np.dtype | None:
    return DTYPES.get(name.text) if isinstance(name, Name) else None


def _counts(values: Sequence[Any]) -> bool:
    return len(values) <= MAX_AXES and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _parameter(data: Any, *_: Any) -> Stored:
    """The tensor in it; whether it needs gradients, hooks and attributes are left out."""
    if not isinstance(data, Stored):
        raise Refused("makes a parameter of something else than a tensor")
    return data


def _with_type(rebuild: Any, kind: Any, arguments: Any, _attributes: Any) -> Stored:
    """A tensor that carries attributes: they are left out."""
    if not isinstance(kind, Name) or kind.text not in TENSOR_TYPES:
        raise Refused("rebuilds a tensor of a type that is none")
    if not isinstance(rebuild, Name) or not rebuild.text.startswith("torch._utils."):
        raise Refused("rebuilds a tensor by no function for that")
    return _parameter(call(rebuild, arguments))


def _size(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not _counts(values):
        raise Refused("makes a torch.Size of something else than counts")
    return values


TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")

CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _v1,
    "torch._utils._rebuild_tensor_v2": _v2,
    "torch._utils._rebuild_tensor_v3": _v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_type,
}

KNOWN = {*DTYPES, *STORAGES, *CALLS, *TENSOR_TYPES}


def named(module: Any, name: Any) -> Name:
    """A name of the tables; anything else is refused, by its name."""
    text = f"{module}.{name}" if type(module) is type(name) is str else "what is no name"
    if text not in KNOWN:
        raise Refused(f"asks for {text[:200]!r}")
    return Name(text)


def call(function: Any, arguments: Any) -> Any:
    """What one of the known functions makes of its arguments."""
    if not isinstance(function, Name) or function.text not in CALLS:
        raise Refused(f"calls {function.text if isinstance(function, Name) else 'no function'}")
    if not isinstance(arguments, tuple):
        raise Refused(f"calls {function.text} with no arguments")
    try:
        return CALLS[function.text](*arguments)
    except TypeError as error:  # too few arguments, or too many
        raise Refused(f"calls {function.text} with {len(arguments)} arguments") from error


def storage_of(reference: Any) -> Storage:
    """The storage that a persistent id names: ("storage", type, key, device, count[, view])."""
    if not isinstance(reference, tuple) or len(reference) not in (5, 6):
        raise Refused("refers to something else than a storage")
    tag, kind, name, _device, count, *view = reference
    if tag != "storage" or not isinstance(kind, Name) or kind.text not in STORAGES:
        raise Refused("refers to something else than a storage")
    if type(name) is not str or not _counts((count,)):
        raise Refused("refers to a storage by no name, or without its size")
    if view not in ([], [None]):
        raise Refused("holds a storage that is a view of another (PyTorch before 0.4)")
    return Storage(name, STORAGES[kind.text], count)
