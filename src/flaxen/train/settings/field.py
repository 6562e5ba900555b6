"""Settings that know what they mean and what they may be."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError, did_you_mean

GREATEST = 2**31 - 1
"""Of whole numbers, unless a setting says another: those that devices count with."""


def setting(
    default: Any = dataclasses.MISSING,
    about: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    free: bool = False,
    flag: Any = True,
) -> Any:
    """A field of a dataclass of settings.

    about: one line for people. least, above, most, below, choices: what it may be, if it is not
    None; of a list or a mapping the bounds hold for each entry. choices may be a function, as
    registries grow. free: a run that goes on may have another value. flag: whether the command line
    has it too, or as what type.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    rules = bounds | {"choices": choices}
    return dataclasses.field(
        default=default, metadata={"about": about, "free": free, "flag": flag, **rules}
    )


def names_in(registry: str, *more: Any) -> Callable[[], tuple[Any, ...]]:
    """What is in a registry, MODULE:NAME, when it is asked; its module may need the settings."""
    module, _, name = registry.partition(":")
    return lambda: (*more, *getattr(importlib.import_module(module), name))


def choices_of(field: dataclasses.Field[Any]) -> tuple[Any, ...] | None:
    """What a setting may be, if that can be listed."""
    choices: Any = field.metadata["choices"]
    if choices is None:
        return None
    named: Any = choices() if callable(choices) else choices
    return tuple(named)


def spelled(choice: Any) -> str:
    """A choice as YAML and flags have it."""
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def described(field: dataclasses.Field[Any]) -> str:
    """What a setting is and what it may be, for people."""
    about, choices = field.metadata["about"], choices_of(field)
    return about if choices is None else f"{about} One of {', '.join(map(spelled, choices))}."


def problems(settings: Any) -> Iterator[str]:
    """What is out of range, setting by setting."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue
        wanted, choices = _expected(value, field.metadata), choices_of(field)
        if wanted is None and choices is not None and value not in choices:
            words = [spelled(choice) for choice in choices]
            near = did_you_mean(str(value), words, most=0)
            wanted = " or ".join(", ".join(words).rsplit(", ", 1)) + f".{near}".rstrip(".")
        if wanted is not None:
            yield f"{field.name} is {value!r}, expected {wanted}"


def _expected(value: Any, rules: Any) -> str | None:
    """What was expected of a value, if it is not that."""
    least, above, most, below = (rules.get(x) for x in ("least", "above", "most", "below"))
    numbers = [bound for bound in (least, above, most, below) if bound is not None]
    if numbers and isinstance(value, Mapping | list | tuple):
        each = value.values() if isinstance(value, Mapping) else value
        wanted = next(filter(None, (_expected(x, rules) for x in each)), None)
        return wanted and f"of each entry {wanted}"
    if numbers and (isinstance(value, str | bool) or not isinstance(value, int | float)):
        return "a number"
    if least is not None and not value >= least:
        return f"at least {least}"
    if above is not None and not value > above:
        return f"more than {above}"
    if most is not None and not value <= most:
        return f"at most {most}"
    if below is not None and not value < below:
        return f"less than {below}"
    if numbers and most is None and isinstance(value, int) and value > GREATEST:
        return f"at most {GREATEST}"
    if not _finite(value):
        return "finite numbers" if isinstance(value, Mapping | list | tuple) else "a finite number"
    return None


def _finite(value: Any) -> bool:
    """Whether no number is infinite or NaN, of those inside too."""
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def checked(settings: Any, more: Sequence[str] = ()) -> None:
    """
    Raises:
        ConfigError: naming each setting that is out of range, and what is wrong `more`.
    """
    wrong = [*problems(settings), *more]
    if wrong:
        end = "" if wrong[-1].endswith("?") else "."
        raise ConfigError(f"Training settings: {'; '.join(wrong)}{end}")


def plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
