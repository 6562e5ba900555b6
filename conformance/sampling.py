"""Keys that patterns match, and keys that they just miss."""

from __future__ import annotations

import itertools
import re._constants as sre
import re._parser as parser
from collections.abc import Iterator, Sequence

PREFIXES = ("", "model.", "model.layers.3.", "vision_tower.encoder.layers.11.", "x", "a.model.")
SUFFIXES = ("", ".weight", ".bias", "s", "_scale_inv", ".0.weight", ".weight.absmax")
NUMBERS = ("0", "7", "12")


def texts(pattern: str, number: str = "0", anything: str = ".") -> list[str]:
    """Texts that a source pattern matches: one for each choice that its alternatives leave.

    anything: what a lone dot stands for.
    """
    regex = pattern.replace("*.", r"\d+\.")
    return sorted(set(itertools.islice(_texts(parser.parse(regex), number, anything), 12)))


def _texts(tree: Sequence, number: str, anything: str) -> Iterator[str]:
    parts = [list(_part(op, arg, number, anything)) for op, arg in tree]
    yield from ("".join(choice) for choice in itertools.product(*parts))


def _part(op, arg, number: str, anything: str) -> Iterator[str]:
    if op is sre.LITERAL:
        yield chr(arg)
    elif op is sre.ANY:
        yield anything
    elif op is sre.NOT_LITERAL:
        yield "y"
    elif op is sre.IN:
        kind, value = arg[0]
        yield number if kind is sre.CATEGORY else chr(value if kind is sre.LITERAL else value[0])
    elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, _, inner = arg
        yield from itertools.islice(_texts(inner, number, "y"), 6)
        if low == 0:
            yield ""
    elif op is sre.SUBPATTERN:
        yield from _texts(arg[-1], number, anything)
    elif op is sre.BRANCH:
        for branch in arg[1]:
            yield from _texts(branch, number, anything)
    elif op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
        yield ""
    else:
        raise NotImplementedError(f"{op} in a pattern")


def keys(patterns: Sequence[str], doubled: bool = True) -> list[str]:
    """Keys around what the patterns match: with prefixes and suffixes, doubled, one letter off."""
    found: dict[str, None] = {}
    for pattern in patterns:
        for number in NUMBERS:
            for text in texts(pattern, number, "y" if number == "7" else ".")[:6]:
                found.update(dict.fromkeys(_around(text, doubled)))
    return list(found)


def _around(text: str, doubled: bool) -> Iterator[str]:
    yield from (prefix + text + suffix for prefix in PREFIXES for suffix in SUFFIXES)
    if doubled:
        yield f"{text}.{text}"
        yield f"model.{text}.x.{text}.weight"
    if text:
        yield f"model.{text[:-1]}.weight"
        yield f"model.{text[1:]}.weight"
        yield f"model.{text.replace('.', '_')}.weight"
        yield f"model.{text[: len(text) // 2]}z{text[len(text) // 2 :]}.weight"
