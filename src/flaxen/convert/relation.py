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


@dataclasses.dataclass(frozen=True)
class Under:
    """A part at the top of a model in which names of its own hold: `name` is what the file has in
    the part's place, which may be nothing.
    """

    name: str
    names: Names

    def prefixed(self, rest: str) -> str:
        return f"{self.name}.{rest}" if self.name else rest


Names = Mapping[str, "str | Join | Under"]
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
    def axes(self) -> dict[str, dict[str, int]]:
        """The axes of each weight as the layout speaks of them, by label: where it places query
        heads by the key head that they share, `heads` are `kv_heads` times `group`.
        """
        found = (p.axes["kv_heads"] for _, p in self.parts.values() if "kv_heads" in p.axes)
        shared = next(found, 1)
        return {
            label: _grouped(param.axes, shared)
            if "group" in self.layout.order(label) and "heads" in param.axes
            else param.axes
            for label, (_, param) in self.parts.items()
        }

    @cached_property
    def _sizes(self) -> dict[str, list[int]]:
        return {label: self.layout.sizes(label, axes) for label, axes in self.axes.items()}

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
            order, axes = self.layout.order(label), self.axes[label]
            inner = [axes[a] for a in order]
            if joint is None:
                pieces = [t.reshape(inner) for t in sources]
            else:
                size = self._sizes[label][joint]
                box = [slice(None)] * len(self._joint_sizes)
                box[joint] = slice(offset, offset + size)
                pieces = [t.crop(box).reshape(inner) for t in sources]
                offset += size
            outer = [axes[a] for a in self.stacked]
            tensor = stack(pieces).reshape(outer + inner) if outer else pieces[0]
            have = self.stacked + order
            out[path] = tensor.permute([have.index(a) for a in axes]).reshape(param.shape)
        return out

    def save(self, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors of the file by name, from our weights by path: `load` backwards."""
        pieces = []
        for label, (path, _) in self.parts.items():
            axes = self.axes[label]
            want = self.stacked + self.layout.order(label)
            tensor = weights[path].reshape(list(axes.values()))
            tensor = tensor.permute([list(axes).index(a) for a in want])
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
            if sorted(placed) != sorted(self.axes[label]):
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
    rename, find = renamer(names), _joiner(names)
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
        known = {axis for _, param in parts.values() for axis in param.axes}
        layout = layout.only(known | ({"group"} if "heads" in known else set()))
    elif len(parts) > 1:
        ours = " and ".join(path for path, _ in parts.values())
        raise ConfigError(f"{ours} are both named {name!r}.")
    return Row(name, layout, parts).check()


def _grouped(axes: Mapping[str, int], shared: int) -> dict[str, int]:
    out: dict[str, int] = {}
    for axis, size in axes.items():
        out |= {"kv_heads": shared, "group": size // shared} if axis == "heads" else {axis: size}
    return out


def renamer(names: Names) -> Callable[[str], str]:
    """Replace whole segments of a path, longest first, in one pass: no result is renamed again. A
    `*` in a key is a number, which takes the place of that in the name.
    """
    plain = {k: v for k, v in names.items() if isinstance(v, str)}
    inner = {f"{k}.": (v, renamer(v.names)) for k, v in names.items() if isinstance(v, Under)}
    ordered = sorted(plain, key=len, reverse=True)
    keys = "|".join(re.escape(k).replace(r"\*", r"\d+") for k in ordered)
    pattern = re.compile(rf"(?<![^.])(?:{keys})(?![^.])" if plain else "(?!)")

    def name(match: re.Match[str]) -> str:
        if match[0] in plain:
            return plain[match[0]]
        numbers = iter(_NUMBER.findall(match[0]))
        return re.sub(r"\*", lambda _: next(numbers), plain[_NUMBER.sub("*", match[0])])

    def rename(path: str) -> str:
        for start, (under, within) in inner.items():
            if path.startswith(start):
                return under.prefixed(within(path.removeprefix(start)))
        return pattern.sub(name, path)

    return rename


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _joiner(names: Names) -> Callable[[str], tuple[str, str, str] | None]:
    """For the path of a joined weight: (its label, the path with the joined name, the layout)."""
    inner = {f"{k}.": _joiner(v.names) for k, v in names.items() if isinstance(v, Under)}
    here = _joined_here([v for v in names.values() if isinstance(v, Join)])

    def find(path: str) -> tuple[str, str, str] | None:
        for start, within in inner.items():
            if path.startswith(start):
                found = within(path.removeprefix(start))
                return found and (found[0], start + found[1], found[2])
        return here(path)

    return find


def _joined_here(joins: list[Join]) -> Callable[[str], tuple[str, str, str] | None]:
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
