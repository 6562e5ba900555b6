"""Which tensors of a checkpoint each weight of a model lives in, read in both directions.

The abstract model is walked once; nothing matches patterns against the names in a checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from flaxen.convert.layout import Layout, parse
from flaxen.convert.lazy import LazyTensor, concat, stack
from flaxen.core.errors import ConfigError
from flaxen.core.tree import Param, is_param, paths


@dataclasses.dataclass(frozen=True)
class Join:
    """Several of our modules that share one tensor.

    `name` is the module of that tensor inside their common parent; the labels of `layout` are the
    paths of our modules inside it.
    """

    name: str
    layout: str

    @property
    def parts(self) -> list[str]:
        """The paths of our modules."""
        return parse(self.layout).labels


Names = Mapping[str, str | Join]
"""Our path pieces (whole segments) -> theirs; `{axis}` there means one tensor for each index."""


class TableRow(NamedTuple):
    """One of our weights, where it lives and how."""

    path: str
    names: tuple[str, ...]
    layout: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of the file (or one for each index of the axes in its name) and our weights."""

    name: str
    layout: Layout
    parts: dict[str, tuple[str, Param]]
    """Label in the layout -> (our path, our weight), in the layout's order."""

    @cached_property
    def stacked(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the file, in the order of the stacked axes: 9 comes before 10."""
        if not self.stacked:
            return (self.name,)
        _, param = next(iter(self.parts.values()))
        indices = itertools.product(*(range(param.axes[a]) for a in self.stacked))
        return tuple(
            self.name.format(**dict(zip(self.stacked, index, strict=True))) for index in indices
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the file."""
        return self.layout.shape(self._joint_sizes)

    @cached_property
    def _sizes(self) -> dict[str, list[int]]:
        return {label: self.layout.sizes(label, p.axes) for label, (_, p) in self.parts.items()}

    @cached_property
    def _joint_sizes(self) -> list[int]:
        every = list(self._sizes.values())
        joint = self.layout.joint
        return [sum(s[i] for s in every) if i == joint else n for i, n in enumerate(every[0])]

    def load(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Our weights by path, from the tensors of a checkpoint."""
        sources = [tensors[name].reshape(self._joint_sizes) for name in self.names]
        joint, offset, out = self.layout.joint, 0, {}
        for label, (path, param) in self.parts.items():
            order = self.layout.order(label)
            inner = [param.axes[a] for a in order]
            if joint is None:
                pieces = [t.reshape(inner) for t in sources]
            else:
                size = self._sizes[label][joint]
                box = [slice(None)] * len(self._joint_sizes)
                box[joint] = slice(offset, offset + size)
                pieces = [t.crop(box).reshape(inner) for t in sources]
                offset += size
            outer = [param.axes[a] for a in self.stacked]
            tensor = stack(pieces).reshape(outer + inner) if outer else pieces[0]
            have = self.stacked + order
            out[path] = tensor.permute([have.index(a) for a in param.axes])
        return out

    def save(self, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors of the file by name, from our weights by path: `load` backwards."""
        pieces = []
        for label, (path, param) in self.parts.items():
            ours = list(param.axes)
            want = self.stacked + self.layout.order(label)
            tensor = weights[path].permute([ours.index(a) for a in want])
            pieces.append(tensor.reshape([len(self.names), *self._sizes[label]]))
        joint = self.layout.joint
        whole = pieces[0] if joint is None else concat(pieces, joint + 1)
        rest = [slice(None)] * (whole.ndim - 1)
        return {
            name: whole.crop([slice(i, i + 1), *rest]).reshape(self.shape)
            for i, name in enumerate(self.names)
        }

    def check(self) -> Row:
        """The row itself, once every axis of every weight has its place."""
        for label, (path, param) in self.parts.items():
            placed = self.layout.order(label) + self.stacked
            if sorted(placed) != sorted(param.axes):
                raise ConfigError(
                    f"{path} has the axes {list(param.axes)}, but {self.name!r} with layout "
                    f"{self.layout.text!r} places {placed}."
                )
        return self


@dataclasses.dataclass(frozen=True)
class Relation:
    """All rows between a model and its checkpoint."""

    rows: tuple[Row, ...]

    def names(self) -> list[str]:
        """Every tensor that the checkpoint should have."""
        return [name for row in self.rows for name in row.names]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of them."""
        return {name: row.shape for row in self.rows for name in row.names}

    def load(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Our weights by path; nothing is read."""
        return {path: t for row in self.rows for path, t in row.load(tensors).items()}

    def save(self, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors of the checkpoint by name; nothing is read."""
        return {name: t for row in self.rows for name, t in row.save(weights).items()}

    def table(self) -> Iterator[TableRow]:
        """Each of our weights: path, names in the file, layout, bytes."""
        for row in self.rows:
            for path, param in row.parts.values():
                yield TableRow(path, row.names, row.layout.text, param.nbytes)


def relate(abstract: Any, names: Names) -> Relation:
    """The relation between an abstract model and its checkpoints.

    Raises:
        ConfigError: two weights would share a name, or a layout does not fit a weight.
    """
    rename = renamer({k: v for k, v in names.items() if isinstance(v, str)})
    find = _joiner([v for v in names.values() if isinstance(v, Join)])
    parts: dict[str, dict[str, tuple[str, Param]]] = {}
    layouts: dict[str, str] = {}
    for path, param in paths(abstract, is_leaf=is_param).items():
        label, joined, layout = find(path) or (path, path, param.layout)
        name = rename(joined)
        here = parts.setdefault(name, {})
        if label in here or layouts.setdefault(name, layout) != layout:
            raise ConfigError(f"{path} and {next(iter(here.values()))[0]} are both named {name!r}.")
        here[label] = (path, param)
    return Relation(tuple(_row(name, parse(layouts[name]), parts[name]) for name in parts))


def _row(name: str, layout: Layout, parts: dict[str, tuple[str, Param]]) -> Row:
    if layout.labels:
        absent = [label for label in layout.labels if label not in parts]
        if absent:
            raise ConfigError(f"{name!r} joins {layout.labels}, but the model has no {absent}.")
        parts = {label: parts[label] for label in layout.labels}
        layout = layout.only({axis for _, param in parts.values() for axis in param.axes})
    elif len(parts) > 1:
        ours = " and ".join(path for path, _ in parts.values())
        raise ConfigError(f"{ours} are both named {name!r}.")
    return Row(name, layout, parts).check()


def renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Replace whole segments of a path, longest first, in one pass: no result is renamed again. A
    `*` in a key is a number, which takes the place of that in the name.
    """
    if not names:
        return lambda path: path
    ordered = sorted(names, key=len, reverse=True)
    keys = "|".join(re.escape(k).replace(r"\*", r"\d+") for k in ordered)
    pattern = re.compile(rf"(?<![^.])(?:{keys})(?![^.])")

    def name(match: re.Match[str]) -> str:
        if match[0] in names:
            return names[match[0]]
        numbers = iter(_NUMBER.findall(match[0]))
        return re.sub(r"\*", lambda _: next(numbers), names[_NUMBER.sub("*", match[0])])

    return lambda path: pattern.sub(name, path)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _joiner(joins: list[Join]) -> Callable[[str], tuple[str, str, str] | None]:
    """For the path of a joined weight: (its label, the path with the joined name, the layout)."""
    by_label = {label: join for join in joins for label in join.parts}
    if not by_label:
        return lambda path: None
    keys = "|".join(re.escape(k) for k in sorted(by_label, key=len, reverse=True))
    pattern = re.compile(rf"(?<![^.])({keys})\.([^.]+)$")

    def find(path: str) -> tuple[str, str, str] | None:
        match = pattern.search(path)
        if match is None:
            return None
        join = by_label[match[1]]
        return match[1], f"{path[: match.start()]}{join.name}.{match[2]}", join.layout

    return find
