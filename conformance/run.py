"""Compare our transforms with Transformers' own, entry by entry of its whole mapping.

Run it with a Python that has torch, transformers and this package (`make conformance`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import checkpoints
import counterpart
import names
from transformers.utils import logging

COUNTED = {
    "entries": "entries of the mapping",
    "transforms": "transforms, each made with the arguments of theirs",
    "patterns": "times source and target patterns compared, there and back",
    "renames": "keys renamed by one transform, in two scopes, there and back",
    "chains": "keys renamed by all transforms of an entry, there and back",
    "with_converter": "entries with a converter",
    "converters": "converters that took part in a checkpoint",
    "checkpoints": "checkpoints loaded by both",
    "tensors": "tensors of these compared bit for bit",
    "saved": "of the checkpoints given back exactly by us",
    "theirs_saved": "of the checkpoints given back exactly by theirs",
    "new": "times the same weights saved as a new model's by both",
}


class Result:
    """Counts, and what differs."""

    def __init__(self) -> None:
        self.entries = self.transforms = self.patterns = self.renames = self.used = self.chains = 0
        self.with_converter = self.checkpoints = self.converters = self.tensors = 0
        self.saved = self.theirs_saved = self.new = 0
        self.failures: list[str] = []
        self.decisions: dict[str, list[str]] = {}
        self.not_covered: list[str] = []

    def fail(self, text: str) -> None:
        self.failures.append(text)

    def decide(self, reason: str | None, text: str) -> None:
        """A difference: one that we chose, for this reason, or a failure."""
        if reason is None:
            self.failures.append(text)
        else:
            self.decisions.setdefault(reason, []).append(text)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print the counts as JSON")
    options.add_argument("--only", help="one entry of the mapping")
    options.add_argument("--checkpoints", action="store_true", help="leave the names out")
    chosen = options.parse_args()
    logging.disable_progress_bar()
    result, start = Result(), time.perf_counter()
    mapping = counterpart.their_mapping()
    for entry, transforms in mapping.items():
        if chosen.only in (None, entry):
            result.entries += 1
            result.transforms += len(transforms)
            if not chosen.checkpoints:
                names.compare(entry, transforms, result)
            names.compare_chains(entry, transforms, result)
            checkpoints.compare(entry, transforms, result)
    seconds = time.perf_counter() - start
    if chosen.json:
        print(json.dumps(vars(result) | {"seconds": seconds}, indent=1))
    else:
        show(result, seconds)
    return bool(result.failures)


def show(result: Result, seconds: float) -> None:
    for name, words in COUNTED.items():
        print(f"{getattr(result, name):>10,}  {words}")
    for text in result.not_covered:
        print(f"\nnot covered: {text}")
    for reason, where in result.decisions.items():
        print(f"\ndiffers by decision ({len(where):,}): {reason}\n  e.g. {where[0]}")
    for text in result.failures[:40]:
        print(f"\nFAILED {text}")
    print(f"\n{len(result.failures)} failures, {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
