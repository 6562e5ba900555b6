"""Changes of a config, and how many of them make up a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
Path = tuple[str, ...]
Change = tuple[Path, Any]
"""The keys that lead to a value, and what becomes of it."""


def changed(config: Config, changes: list[Change]) -> Config:
    """The config with these changes."""
    made = dict(config)
    for (key, *rest), value in changes:
        made[key] = changed(made.get(key) or {}, [(tuple(rest), value)]) if rest else value
    return made


def possible(
    changes: list[Change], failure: Callable[[list[Change]], str | None]
) -> tuple[list[Change], list[list[Any]]]:
    """As many changes as there is a model with, and the others as name, value and reason: one at
    fault, or those that do not fit to the others, one after another.
    """
    why = failure(changes)
    if why is None:
        return changes, []
    named = sorted(range(len(changes)), key=lambda i: changes[i][0][-1] not in why)
    for i, (path, value) in ((i, changes[i]) for i in named):
        if failure(without := changes[:i] + changes[i + 1 :]) is None:
            return without, [[".".join(path), value, why]]
    kept, left, reasons = [], list(changes), {}
    for _ in range(2):  # some need others that come after them
        for change in left:
            reasons[change[0]] = why = failure([*kept, change])
            if why is None:
                kept.append(change)
        left = [change for change in left if change not in kept]
    return kept, [[".".join(path), value, reasons[path]] for path, value in left]
