"""The file that keeps what was measured."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between two marks of the results file."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    old = path.read_text() if path.exists() else ""
    if start not in old:
        old += f"\n{start}{end}\n"
    before, _, rest = old.partition(start)
    path.write_text(before + start + text + end + rest.partition(end)[2])
