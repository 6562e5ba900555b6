"""Settings that know what they mean and what they may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError

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
    choices: Sequence[Any] | None = None,
    free: bool = False,
    flag: Any = True,
) -> Any:
    """A field of a dataclass of settings.

    about: one line for people. least, above, most, below, choices: what it may be, if it is not
    None. free: a run that goes on may have another value. flag: whether the command line has it
    too, or as what type.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    rules = bounds | {"choices": choices}
    return dataclasses.field(
        default=default, metadata={"about": about, "free": free, "flag": flag, **rules}
    )


def problems(settings: Any) -> Iterator[str]:
    """What is out of range, setting by setting."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        wanted = None if value is None else _expected(value, field.metadata)
        if wanted is not None:
            yield f"{field.name} is {value!r}, expected {wanted}"


def _expected(value: Any, rules: Any) -> str | None:
    """What was expected of a value, if it is not that."""
    least, above, most, below = (rules.get(x) for x in ("least", "above", "most", "below"))
    numbers = [bound for bound in (least, above, most, below) if bound is not None]
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
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        return " or ".join(", ".join(map(str, choices)).rsplit(", ", 1))
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
        raise ConfigError(f"Training settings: {'; '.join(wrong)}.")


def plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
