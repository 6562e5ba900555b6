"""What commands print: JSON to stdout, remarks to stderr, progress while bytes move."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

NUMBERS = re.compile(r"\[\n([-+\d.eE,\s]+)\]")
"""A list of numbers, one a line, in JSON; in its strings there are no line breaks."""


def print_json(value: Any, *, lines: bool = True) -> None:
    """One JSON object on stdout, in several lines or in one; a list of numbers is in one. What
    JSON does not know, also NaN, becomes its text.
    """
    text = json.dumps(_known(value), indent=2 if lines else None, ensure_ascii=False, default=str)
    print(NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text))


def _known(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    return [_known(each) for each in value] if isinstance(value, list | tuple) else value


def print_out(*things: Any) -> None:
    """Text and tables on stdout, in the width of the terminal; 120 columns where it is none.

    Strings are printed as they are: names and messages come from files, and may have brackets.
    """
    from rich.console import Console

    class Out(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the command with status 1

    console = Out(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    console.print(*things)


def has_colours() -> bool:
    """Whether stdout shows colours: it is a terminal, and NO_COLOR is not said."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def marks() -> tuple[str, str]:
    """What stands around a text in place of a colour, in letters that stdout knows."""
    try:
        "⟦⟧".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "[[", "]]"
    return "⟦", "⟧"


def print_mark(good: bool, text: str) -> None:
    """A line on stdout that begins with a green tick or a red cross."""
    from rich.text import Text

    mark, style = ("✓", "bold green") if good else ("✗", "bold red")
    print_out(Text.assemble((mark, style), f" {text}"))


def remark(text: str) -> None:
    """A dim line on stderr, where it does not mix with the answer."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))


def write_now(text: str) -> None:
    """Text on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
