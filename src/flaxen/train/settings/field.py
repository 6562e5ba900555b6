"""Settings that know what they mean and what they may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flaxen.core.errors import ConfigError


def setting(
    default: Any = dataclasses.MISSING,
    about: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[Any] | None = None,
    free: bool = False,
    flag: Any = True,
) -> Any:
    """A field of a dataclass of settings.

    about: one line for people. least, above, most, choices: what it may be, if it is not None.
    free: a run that goes on may have another value. flag: whether the command line has it too, or
    as what type.
    """
    rules = {"least": least, "above": above, "most": most, "choices": choices}
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
    least, above, most = rules.get("least"), rules.get("above"), rules.get("most")
    numbers = [bound for bound in (least, above, most) if bound is not None]
    if numbers and (isinstance(value, str | bool) or not isinstance(value, int | float)):
        return "a number"
    if least is not None and not value >= least:
        return f"at least {least}"
    if above is not None and not value > above:
        return f"more than {above}"
    if most is not None and not value <= most:
        return f"at most {most}"
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        return " or ".join(", ".join(map(str, choices)).rsplit(", ", 1))
    return None


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
