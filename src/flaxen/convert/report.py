"""What was found while loading, all of it, before anything is said."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flaxen.core.errors import CheckpointError


class Mismatch(NamedTuple):
    """A tensor of another shape than the model wants."""

    name: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


@dataclasses.dataclass
class Report:
    """How a checkpoint fitted a model. Names are those of the hub.

    `tied` maps a tensor that is not kept to the one used in its place; `doubled` lists those that
    the file holds all the same, and saving writes again; `untied` holds such pairs that the config
    declares equal although the file differs; `errors` maps a tensor that could not be made from
    those of the file to the reason; `left_out` are tensors of heads that the model does not have;
    `absent` are those that the file may lack, and did: saving leaves them out while they are zeros;
    `unread` are config keys nobody read;
    `replicated` says which axes a plan would cut but leaves whole, since they do not divide.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: list[Mismatch] = dataclasses.field(default_factory=list)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    doubled: list[str] = dataclasses.field(default_factory=list)
    untied: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    absent: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)
    replicated: list[str] = dataclasses.field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0

    def raise_if_bad(self, strict: bool = True, ignore_mismatched_sizes: bool = False) -> None:
        """One error for all problems; if not `strict`, only for those that no default mends.

        Raises:
            CheckpointError: with a table of what is missing, unexpected, misshapen or untied.
        """
        rows = list(self._rows())
        if not strict:
            rows = [row for row in rows if row[0] in ("mismatched", "conversion")]
        if ignore_mismatched_sizes:
            rows = [row for row in rows if row[0] != "mismatched"]
        if rows:
            raise CheckpointError(
                f"The checkpoint does not fit the model:\n{_table(rows)}\n"
                "Check that the config belongs to these weights, and that every file is complete; "
                "names that all differ in the same way can be led over by key_mapping."
            )

    def summary(self) -> str:
        """A line on the load, then a table of what was unusual."""
        rate = self.bytes_read / 1e9 / self.seconds if self.seconds else 0.0
        line = f"{self.bytes_read / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.1f} GB/s)"
        rows = [*self._rows(), *(("tied", name, f"is {to}") for name, to in self.tied.items())]
        rows += [("left out", name, "of another head") for name in fold(self.left_out)]
        rows += [("unread", key, "config key") for key in self.unread]
        rows += [("replicated", note, "") for note in self.replicated]
        return "\n".join([line, _table(rows)] if rows else [line])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for name in fold(self.missing):
            yield "missing", name, ""
        for name in fold(self.unexpected):
            yield "unexpected", name, ""
        shapes: dict[tuple[Any, Any], list[str]] = {}
        for name, found, expected in self.mismatched:
            shapes.setdefault((found, expected), []).append(name)
        for (found, expected), names in shapes.items():
            for name in fold(names):
                yield "mismatched", name, f"found {list(found)}, expected {list(expected)}"
        for name, reason in self.errors.items():
            yield "conversion", name, reason
        for target, source in self.untied:
            yield "untied", target, f"differs from {source}, to which the config ties it"


def fold(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers only, as one: `layers.{0...31}.x`."""
    folded: dict[tuple[Any, ...], None] = dict.fromkeys(_tokens(name) for name in names)
    width = max((len(tokens) for tokens in folded), default=0)
    for place in reversed(range(width)):
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for tokens in folded:
            number = place < len(tokens) and isinstance(tokens[place], int)
            key = (*tokens[:place], None, *tokens[place + 1 :]) if number else tokens
            groups.setdefault(key, []).append(tokens[place] if number else None)
        folded = {
            key if values[0] is None else _with(key, place, values): None
            for key, values in groups.items()
        }
    return [".".join(map(_text, tokens)) for tokens in folded]


def _tokens(name: str) -> tuple[Any, ...]:
    return tuple(int(t) if re.fullmatch(r"0|[1-9]\d*", t) else t for t in name.split("."))


def _with(key: tuple[Any, ...], place: int, values: list[int]) -> tuple[Any, ...]:
    value = values[0] if len(values) == 1 else tuple(sorted(values))
    return (*key[:place], value, *key[place + 1 :])


def _text(token: Any) -> str:
    if not isinstance(token, tuple):
        return str(token)
    if len(token) > 2 and token[-1] - token[0] == len(token) - 1:
        return f"{{{token[0]}...{token[-1]}}}"
    shown = [*map(str, token[:8]), *([f"... {token[-1]}"] if len(token) > 8 else [])]
    return f"{{{', '.join(shown)}}}"


def _table(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(
        f"  {status:{widths[0]}}  {name:{widths[1]}}  {details}".rstrip()
        for status, name, details in rows
    )
