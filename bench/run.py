"""flaxen side by side with Transformers on torch, in one run: `make bench`.

Both sides hold the same weights; they take turns, so that a busy machine slows both. Medians and
ratios go to `bench/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from results import RESULTS, write_section
from shapes import CONFIG, NEW, describe, folder

HERE = Path(__file__).parent

PATIENCE = 90


class Work(NamedTuple):
    """One row of the table: what to run, tokens it handles, and the ratio to reach."""

    title: str
    name: str
    options: dict[str, Any]
    tokens: int
    goal: float


def workloads() -> list[Work]:
    rows = []
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 8):
            options = {"dtype": dtype, "batch": batch}
            rows.append(Work(f"decode batch {batch} {dtype}", "decode", options, batch * NEW, 1.5))
        options = {"dtype": dtype, "length": 1024}
        rows.append(Work(f"prefill 1x1024 {dtype}", "prefill", options, 1024, 1.0))
        options = {"dtype": dtype, "batch": 2, "length": 512}
        rows.append(Work(f"train step 2x512 {dtype}", "train", options, 1024, 1.0))
    return rows


class Side:
    """A worker process."""

    def __init__(self, python: str, script: str):
        env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
        self.process = subprocess.Popen(
            [python, str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error"},
        )
        self.about = self._answer()["about"]

    def prepare(self, work: Work) -> float:
        return self.begin(work.name, work.options)["first"]

    def run(self) -> float:
        return self.turn()["seconds"]

    def begin(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load, compile and run once: all that the worker answers."""
        return self._ask({"prepare": name, "with": options})

    def turn(self) -> dict[str, Any]:
        """Run once more: all that the worker answers."""
        return self._ask({"run": True})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A worker ended early; its error stands above.")
        return json.loads(line)


def measure(ours: Side, theirs: Side, work: Work, rounds: int) -> dict[str, Any]:
    """Medians of `rounds` turns each, fewer where PATIENCE seconds are over."""
    compiled = ours.prepare(work)
    theirs.prepare(work)
    pairs, start = [], time.perf_counter()
    while len(pairs) < rounds and (not pairs or time.perf_counter() - start < PATIENCE):
        pairs.append((ours.run(), theirs.run()))
    mine, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [b / a for a, b in pairs]
    return {
        "work": work.title,
        "flaxen": work.tokens / mine,
        "torch": work.tokens / peer,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "goal": work.goal,
        "turns": len(pairs),
        "first_run": compiled,
    }


def machine() -> str:
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
        flags = next((x for x in lines if x.startswith("flags")), "")
        wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags]
        model += f" ({', '.join(wide)})"
    return f"{os.cpu_count()} cores, {model}, {platform.system()}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| work | flaxen tokens/s | torch tokens/s | ratio | min-max | turns | goal | "
        "first call, with compiling |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["spread"]
        mark = "" if r["ratio"] >= r["goal"] else " (not reached)"
        lines.append(
            f"| {r['work']} | {r['flaxen']:.0f} | {r['torch']:.0f} | **{r['ratio']:.2f}** | "
            f"{low:.2f}-{high:.2f} | {r['turns']} | {r['goal']:.1f}{mark} | "
            f"{r['first_run']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="python of an environment with torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run the rows whose title contains this")
    given = parser.parse_args()
    for dtype in ("float32", "bfloat16"):
        folder(dtype)
    ours, theirs = Side(sys.executable, "work_flaxen.py"), Side(given.torch, "work_torch.py")
    rows = []
    for work in workloads():
        if given.only in work.title:
            rows.append(measure(ours, theirs, work, given.rounds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    about = f"{ours.about} against {theirs.about} (eager, sdpa)"
    ours.close()
    theirs.close()
    text = f"{machine()}. {about}.\n\nModel: {describe(CONFIG)}\n\n{table(rows)}\n"
    print("\n" + text)
    if not given.only:
        write_section(RESULTS, "compute", text)


if __name__ == "__main__":
    main()
