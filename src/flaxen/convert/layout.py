"""The layout grammar: how one tensor of a file is made of our axes.

"(heads head_dim) embed"                                       a flattened dimension
"{q: heads head_dim | k: kv_heads head_dim} embed"             tensors joined along a dimension
"(heads {q: head_dim | k: head_dim}) embed"                    joined inside a flattened dimension
"(kv_heads {q: group | k | v} head_dim) embed"                  query heads by their key head
"channels 1 kernel"                                            a dimension that we do not have
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from flaxen.core.errors import ConfigError

Alternatives = dict[str, tuple[str, ...]]
Atom = str | int | Alternatives
"""One axis, one literal size, or the axes that each joined tensor has here, by label."""

_BRACES = r"\{[^{}]*\}"
_DIMENSION = re.compile(rf"\((?:[^(){{}}]|{_BRACES})*\)|{_BRACES}|[^\s(){{}}]+")
_ATOM = re.compile(rf"{_BRACES}|[^\s(){{}}]+")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parsed layout: a list of atoms for each dimension of the tensor in the file."""

    text: str
    dims: tuple[tuple[Atom, ...], ...]

    @property
    def labels(self) -> list[str]:
        """The joined tensors, in the order in which they lie in the file."""
        return list(self.joined or ())

    @property
    def joined(self) -> Alternatives | None:
        return next((a for dim in self.dims for a in dim if isinstance(a, dict)), None)

    @property
    def axes(self) -> set[str]:
        found = {a for dim in self.dims for a in dim if isinstance(a, str)}
        return found.union(*(self.joined or {}).values())

    @property
    def joint(self) -> int | None:
        """Which of all atoms, counted through, is the joined one."""
        atoms = [atom for dim in self.dims for atom in dim]
        return next((i for i, atom in enumerate(atoms) if isinstance(atom, dict)), None)

    def only(self, known: set[str]) -> Layout:
        """The layout of a tensor with fewer axes, such as the bias of a joined product."""
        if self.axes <= known:
            return self
        dims = []
        for dim in self.dims:
            # Literals go too: the `1` of a convolution is no dimension of its bias.
            kept = tuple(a for a in dim if isinstance(a, dict) or a in known)
            dims += [kept] if kept else []
        return Layout(self.text, tuple(dims))

    def order(self, label: str) -> list[str]:
        """The axes of one joined tensor in the order of the file."""
        found: list[str] = []
        for atom in (atom for dim in self.dims for atom in dim):
            if isinstance(atom, dict):
                found += atom[label]
            elif isinstance(atom, str):
                found.append(atom)
        return found

    def sizes(self, label: str, axes: Mapping[str, int]) -> list[int]:
        """The size of each atom for one joined tensor."""
        return [
            math.prod(axes[a] for a in atom[label])
            if isinstance(atom, dict)
            else axes[atom]
            if isinstance(atom, str)
            else atom
            for dim in self.dims
            for atom in dim
        ]

    def shape(self, sizes: list[int]) -> tuple[int, ...]:
        """The shape in the file, from the size of each atom."""
        rest = iter(sizes)
        return tuple(math.prod(next(rest) for _ in dim) for dim in self.dims)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Layout:
    """Read a layout.

    Raises:
        ConfigError: unbalanced brackets, a nested group, or more than one joined dimension.
    """
    if _DIMENSION.sub("", text).strip():
        raise ConfigError(f"Layout {text!r} has unbalanced or nested brackets.")
    dims = tuple(
        tuple(_atom(a) for a in _ATOM.findall(dimension)) for dimension in _DIMENSION.findall(text)
    )
    if sum(isinstance(a, dict) for dim in dims for a in dim) > 1:
        raise ConfigError(f"Layout {text!r} joins tensors along more than one dimension.")
    return Layout(text, dims)


def _atom(text: str) -> Atom:
    if text.isdigit():
        return int(text)
    if text[0] != "{":
        return text
    pairs = (part.partition(":") for part in text.strip("{}").split("|"))
    return {label.strip(): tuple(axes.split()) for label, _, axes in pairs}
