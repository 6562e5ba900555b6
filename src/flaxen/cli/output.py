"""What commands print: JSON to stdout, remarks to stderr, progress while bytes move."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object on stdout; what JSON does not know becomes its text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_out(*things: Any) -> None:
    """Text and tables on stdout, in the width of the terminal; 120 columns where it is none."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(*things)


def remark(text: str) -> None:
    """A dim line on stderr, where it does not mix with the answer."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))


def write_now(text: str) -> None:
    """Text on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
