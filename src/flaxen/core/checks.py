"""Checks of single settings, each with the setting's name in the message."""

from __future__ import annotations

import math
import typing
from collections.abc import Collection
from typing import Any

from flaxen.core.errors import ConfigError, did_you_mean


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """
    Raises:
        ConfigError: the value is none of those allowed.
    """
    if not any(value is x or (type(value) is type(x) and value == x) for x in allowed):
        words = [x for x in allowed if isinstance(x, str)]
        near = did_you_mean(value, words) if isinstance(value, str) else ""
        listed = ", ".join(repr(x) for x in allowed)
        raise ConfigError(f"{name} is {value!r}; expected one of {listed}.{near}")


def at_least(name: str, value: Any, least: int) -> None:
    """
    Raises:
        ConfigError: the value is no whole number from `least` on.
    """
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}.")


def positive(name: str, value: Any) -> None:
    """
    Raises:
        ConfigError: the value is no finite number above 0.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0.")


def divides(part: str, least: int, whole: str, most: int) -> None:
    """
    Raises:
        ConfigError: `most` of the one cannot be shared evenly among `least` of the other.
    """
    if least < 1 or most % least:
        raise ConfigError(f"{most} {whole} cannot be shared evenly among {least} {part}.")


def true_or_false(**values: Any) -> None:
    """
    Raises:
        ConfigError: naming the values that are neither True nor False.
    """
    odd = [f"{name} is {value!r}" for name, value in values.items() if type(value) is not bool]
    if odd:
        raise ConfigError(f"{'; '.join(odd)}; expected True or False.")


def of_kind(**values: tuple[Any, Any]) -> None:
    """Each a value and its class, or several.

    Raises:
        ConfigError: naming the first value that is of another.
    """
    for name, (value, kind) in values.items():
        if not isinstance(value, kind):
            kinds = [k.__name__ for k in typing.get_args(kind) or (kind,)]
            listed = " or ".join(kinds).replace("NoneType", "None")
            raise ConfigError(f"{name} is {value!r}; expected {listed}.")
