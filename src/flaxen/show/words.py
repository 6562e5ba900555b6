"""Numbers for people."""

from __future__ import annotations


def human_bytes(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_number(count: float) -> str:
    """134515008 -> '134.5M'."""
    for unit in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def human_seconds(seconds: float) -> str:
    """0.0042 -> '4.2 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            break
    number = seconds / size
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"
