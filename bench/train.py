"""A training step of flaxen beside Transformers on torch, eager and compiled, and EasyDeL, in one
run: `make bench-train`.

Every side is a process of its own that holds the same weights and takes the same batch through the
same AdamW; they take turns, so that a busy machine slows all alike. Those that keep weights in
another dtype are a group of their own, with flaxen again: all at once want too much memory. The
losses of the first steps must agree. Medians, ratios and memory go to `bench/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from results import RESULTS, write_section
from run import Side, machine
from shapes import CONFIG, describe, folder

AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2}
"""How far the losses of the same step may lie apart. EasyDeL tells a bfloat16: those from 8 to 16
are a sixteenth apart.
"""

WARM = 2
"""Steps before the measured ones: EasyDeL compiles its second step anew."""

COMPARED = 3
"""Steps whose losses are compared."""


@dataclass
class Runner:
    """A way to train, its process, and what it answered: losses, seconds, peaks."""

    title: str
    python: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    side: Side | None = None
    failure: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [x["seconds"] for x in self.answers[WARM:]]

    @property
    def peak(self) -> int | None:
        """Of the measured steps."""
        peaks = [x["peak"] for x in self.answers[WARM:] if x["peak"] is not None]
        return max(peaks, default=None)

    def begin(self, work: dict[str, Any]) -> None:
        self.side = Side(self.python, self.script)
        self.answers = [self.side.begin("train", work | self.options)]
        self.turn()

    def turn(self) -> None:
        assert self.side is not None
        self.answers.append(self.side.turn())

    def end(self) -> None:
        if self.side is not None:
            self.side.close()


def group(masters: str, torch: str, easydel: str) -> list[Runner]:
    """Sides that keep weights and moments in `masters`, after flaxen, whose are float32 whatever
    the arithmetic: the same work is torch's autocast, and EasyDeL's float32 parameters.
    """
    rows = [Runner("flaxen, float32 weights", sys.executable, "work_flaxen.py")]
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        kept = {"masters": masters, "compiled": compiled}
        rows.append(Runner(f"torch {how}, {masters} weights", torch, "work_torch.py", kept))
    if easydel:
        title = f"EasyDeL, {masters} weights"
        rows.append(Runner(title, easydel, "work_easydel.py", {"masters": masters}))
    return rows


def measure(rows: list[Runner], work: dict[str, Any], rounds: int, patience: float) -> None:
    """Turns until there are `rounds` of each; who needs longer than `patience` seconds for a step
    ends there.
    """
    for row in rows:
        try:
            row.begin(work)
        except SystemExit as error:
            if row is rows[0]:
                raise
            row.failure = "did not run"
            print(f"  {row.title}: {error}", flush=True)
            continue
        first, second = row.answers[0]["first"], row.answers[1]["seconds"]
        print(f"  {row.title}: first step {first:.1f} s, second {second:.1f} s", flush=True)
    for _ in range(rounds):
        for row in rows:
            if row.failure:
                continue
            start = time.perf_counter()
            row.turn()
            if time.perf_counter() - start > patience:
                row.failure = f"over {patience:.0f} s a step"


def check(rows: list[Runner], dtype: str) -> None:
    """The same losses, step for step: else it is not the same work."""
    for row in rows[1:]:
        pairs = zip(rows[0].answers[:COMPARED], row.answers[:COMPARED], strict=False)
        for at, (mine, other) in enumerate(pairs):
            apart = abs(mine["loss"] - other["loss"])
            if not apart <= AGREEMENT[dtype]:
                raise SystemExit(
                    f"Step {at}: {rows[0].title} has a loss of {mine['loss']:.5f}, {row.title} of "
                    f"{other['loss']:.5f}. They do not do the same work."
                )


def table(rows: list[Runner], tokens: int) -> str:
    lines = [
        "| way | tokens/s | flaxen is faster by | min-max | peak memory of a step, GB | "
        "with compiling | first step, with compiling |",
        "|---|---|---|---|---|---|---|",
    ]
    gb = lambda peak: "" if peak is None else f"{peak / 1e9:.2f}"
    for row in rows:
        if not row.seconds:
            lines.append(f"| {row.title} | {row.failure} | | | | | |")
            continue
        ratios = [b / a for a, b in zip(rows[0].seconds, row.seconds, strict=False)]
        low, high, median = min(ratios), max(ratios), statistics.median(ratios)
        behind = " (behind)" if row is not rows[0] and median < 1 else ""
        speed = f"{tokens / statistics.median(row.seconds):.0f}"
        lines.append(
            f"| {row.title} | {speed}{f' ({row.failure})' if row.failure else ''} | "
            f"**{median:.2f}**{behind} | {low:.2f}-{high:.2f} | {gb(row.answers[-1]['peak'])} | "
            f"{gb(row.answers[0]['peak'])} | {row.answers[0]['first']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="python of an environment with torch")
    parser.add_argument("--easydel", default="", help="python of an environment with EasyDeL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", choices=list(AGREEMENT), help="only this one")
    parser.add_argument("--only", default="", help="sides whose title contains this, and flaxen")
    parser.add_argument("--write", action="store_true", help="keep the result in RESULTS.md")
    given = parser.parse_args()
    parts, abouts = [], []
    size = f"{given.batch}x{given.length}"
    for dtype in [given.dtype] if given.dtype else list(AGREEMENT):
        for masters in dict.fromkeys(["float32", dtype]):
            folder(masters)
            first, *others = group(masters, given.torch, given.easydel)
            rows = [first, *(row for row in others if given.only in row.title)]
            print(f"{dtype} arithmetic, {masters} weights, {size}:", flush=True)
            work = {"dtype": dtype, "batch": given.batch, "length": given.length}
            measure(rows, work, given.rounds, given.patience)
            check(rows, dtype)
            title = f"{dtype} arithmetic, {masters} weights beside flaxen's"
            parts.append(f"{title}\n\n{table(rows, given.batch * given.length)}")
            print(parts[-1], flush=True)
            abouts += [row.side.about for row in rows if row.side]
            for row in rows:
                row.end()
    about = "; ".join(dict.fromkeys(abouts))
    load = f"Load when it ended: {os.getloadavg()[0]:.1f}."
    text = (
        f"A step of {size} tokens, AdamW, clipped; sides in turn, medians of {given.rounds} turns. "
        f"{machine()}. {about}. {load}\n\nModel: {describe(CONFIG)}\n\n" + "\n\n".join(parts)
    )
    print("\n" + text)
    if given.write:
        write_section(RESULTS, "training", text + "\n")


if __name__ == "__main__":
    main()
