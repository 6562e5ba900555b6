"""The pattern language of transforms: regular expressions with a glob, readable both ways.

`*.` stands for any text and a dot; `\\1` in a target for what the first group of the source took.
A pattern that ends in a letter or digit ends there: `weight` does not match `weights`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from flaxen.core.errors import ConfigError

_NO_GROUP = re.compile(r"\(\?(?!P<)")
"""The start of what is in parentheses and no group: a look-around, an alternative."""


def natural_key(name: str) -> tuple[tuple, ...]:
    """Sorts names as one counts: `layers.2` before `layers.10`, `x9` before `x10`."""
    return tuple(_natural_part(part) for part in name.split("."))


@functools.lru_cache(maxsize=1 << 14)
def _natural_part(part: str) -> tuple:
    text = part.rstrip("0123456789")
    digits = part[len(text) :].lstrip("0")
    # A number by its length and digits: `int` refuses those of thousands of digits.
    number = (len(digits), digits) if len(text) < len(part) else ()
    return (1, text, *number) if text else (0, *number)


def compile_sources(patterns: Sequence[str]) -> re.Pattern[str]:
    """One expression with a branch `g<i>` for each source pattern, the longest tried first.

    Raises:
        ConfigError: a pattern is no regular expression.
    """
    order = sorted(range(len(patterns)), key=lambda i: -len(patterns[i]))
    for pattern in patterns:
        try:
            re.compile(f"(?P<g0>{branch(pattern)})")
        except re.error as error:
            raise ConfigError(
                f"The source pattern {pattern!r} is no regular expression: {error}."
            ) from error
    try:
        return re.compile("|".join(f"(?P<g{i}>{branch(patterns[i])})" for i in order))
    except re.error as error:
        raise ConfigError(f"The source patterns {list(patterns)} clash: {error}.") from error


def branch(pattern: str) -> str:
    """A source pattern as a regular expression."""
    regex = pattern.replace("*.", r".*\.")
    return rf"{regex}(?!\w)" if re.search(r"[A-Za-z0-9]$", regex) else regex


def target_text(pattern: str) -> tuple[str, str | None]:
    """A target as it is written into a name, and the group that `\\1` in it stands for.

    Targets may be the sources of the opposite transform: what only a match can use (anchor,
    look-around, escaped dots) is dropped, and the first group becomes `\\1`.
    """
    text, group = pattern.removeprefix("^"), None
    while (found := _NO_GROUP.search(text)) is not None:
        text = text[: found.start()] + text[_group_end(text, found.start()) :]
    if (start := text.find("(")) >= 0:
        stop = _group_end(text, start)
        text, group = rf"{text[:start]}\1{text[stop:]}", text[start:stop]
    return text.replace(r"\.", "."), group


def numbered_groups(pattern: str) -> tuple[str, list[str]]:
    """A source with `\\1`, `\\2`, ... for its groups, and what these are; look-arounds stay."""
    text, groups, at = pattern, [], 0
    while (at := text.find("(", at)) >= 0:
        stop = _group_end(text, at)
        if _NO_GROUP.match(text, at):
            at = stop
            continue
        groups.append(text[at:stop])
        text = rf"{text[:at]}\{len(groups)}{text[stop:]}"
    return text, groups


def source_text(pattern: str, target: str | None, group: str | None) -> str:
    """A source as it is searched for: `\\1` spelled out, anchored where its target was.

    target: the one that this source becomes, as it was given; None if they do not pair up.

    Raises:
        ConfigError: there is no group that `\\1` could stand for.
    """
    if r"\1" in pattern:
        if group is None:
            raise ConfigError(
                rf"Source pattern {pattern!r} contains \1 backreference, but no capturing groups "
                "found in target_patterns."
            )
        pattern = pattern.replace(r"\1", group, 1)
    anchored = target is not None and target.startswith("^") and not pattern.startswith("^")
    return f"^{pattern}" if anchored else pattern


def _group_end(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise ConfigError(f"The pattern {text!r} has a parenthesis that nothing closes.")


class GlobAlternation:
    """Which of many globs a name matches; `*` is any text, the first one listed wins."""

    def __init__(self, globs: Sequence[str]):
        self.globs = tuple(globs)
        parts = (re.escape(glob).replace(r"\*", ".*") for glob in globs)
        self._regex = re.compile("|".join(f"({part})" for part in parts))

    def match(self, name: str) -> str | None:
        """The glob that is found in the name, if one is."""
        found = self._regex.search(name) if self.globs else None
        return found and self.globs[(found.lastindex or 1) - 1]
