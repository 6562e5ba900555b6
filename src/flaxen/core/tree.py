"""Modules are frozen dataclasses and pytrees; an abstract model holds a `Param` where an array will
be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, dataclass_transform

import jax
import numpy as np

T = TypeVar("T")
C = TypeVar("C", bound=type)

static = Annotated[T, "static"]
"""`eps: static[float]` is structure and compares by value; every other field is data."""

buffer = Annotated[T, "buffer"]
"""`expert_bias: buffer[Any]` is data that no gradient moves: training leaves it as it is, and
loading never makes it narrower than it is stored.
"""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def module(cls: C) -> C:
    """Make a class a frozen keyword-only dataclass and a pytree."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    if not dataclasses.fields(cls):
        # Without this name, jax (0.10.2) may take the program of one class without fields for that
        # of another, once garbage has been collected.
        name = f"{cls.__module__}.{cls.__qualname__}"
        jax.tree_util.register_pytree_with_keys(cls, lambda _: ((), name), lambda *_: cls())
        return cls
    meta = [f.name for f in dataclasses.fields(cls) if str(f.type).startswith("static[")]
    data = [f.name for f in dataclasses.fields(cls) if f.name not in meta]
    return jax.tree_util.register_dataclass(cls, data, meta)


@dataclasses.dataclass(frozen=True)
class Param:
    """A weight before it exists.

    `axes` names and sizes its dimensions in our order; `layout` says how the tensor in the file is
    made of them;
    `init` is `normal`, `zeros` or `ones`; `dtype` is known once a checkpoint was looked at.
    """

    axes: dict[str, int]
    layout: str
    init: str = "normal"
    dtype: np.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype or np.float32).itemsize


def param(layout: str = "", /, **axes: int) -> Param:
    """A `Param` whose tensor in the file has the same axes in the same order, unless `layout` says
    otherwise; fresh ones are normal.
    """
    return Param(axes, layout or " ".join(axes))


def zeros_param(layout: str = "", /, **axes: int) -> Param:
    """A `Param` that is zero when fresh."""
    return Param(axes, layout or " ".join(axes), "zeros")


def ones_param(layout: str = "", /, **axes: int) -> Param:
    """A `Param` that is one when fresh."""
    return Param(axes, layout or " ".join(axes), "ones")


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves by dotted path, in tree order: `layers.0.mlp.up_proj.weight`."""
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=is_leaf)
    return {name_of(path): leaf for path, leaf in flat}


def name_of(path: Any) -> str:
    """The dotted form of a path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def rebuild(tree: Any, leaves: dict[str, Any]) -> Any:
    """The same structure with other leaves, given by path."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in paths(tree)])


def walk(tree: Any) -> Iterator[Any]:
    """Every module in a tree, parents first; lists, tuples and static fields are looked into."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from walk(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield tree
        for field in dataclasses.fields(tree):
            yield from walk(getattr(tree, field.name))


def buffers(tree: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of fields that are buffers."""
    if isinstance(tree, list | tuple | dict):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, item in items:
            yield from buffers(item, f"{path}{key}.")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | Param):
        for field in dataclasses.fields(tree):
            value, kind = getattr(tree, field.name), str(field.type)
            if kind.startswith("buffer[") and value is not None:
                yield f"{path}{field.name}"
            elif not kind.startswith("static["):
                yield from buffers(value, f"{path}{field.name}.")


def partition(tree: Any, keep: Callable[[str, Any], bool]) -> tuple[Any, Any]:
    """Two trees of the same shape, one with the leaves that `keep(path, leaf)` wants, one with the
    rest; None elsewhere.
    """
    flat, structure = jax.tree.flatten_with_path(tree)
    wanted = [keep(name_of(path), leaf) for path, leaf in flat]
    kept = [leaf if want else None for (_, leaf), want in zip(flat, wanted, strict=True)]
    rest = [None if want else leaf for (_, leaf), want in zip(flat, wanted, strict=True)]
    return jax.tree.unflatten(structure, kept), jax.tree.unflatten(structure, rest)


def combine(first: Any, second: Any) -> Any:
    """Undo `partition`: each leaf from whichever tree has it."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None
    )
