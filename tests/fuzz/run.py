"""Damaged checkpoints by the thousand: each must load, or be refused by one of our errors.

PYTHONPATH=tests python -m fuzz.run --cases 10000 --seed 0     (make fuzz)
PYTHONPATH=tests python -m fuzz.run --only 1234 --seed 0       one case, with its traceback
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 60
"""Seconds of wall time after which a case counts as one that hangs."""
SLOW = 5
"""Seconds of processor time that a case may take."""


class Result(NamedTuple):
    """error: "" for a load, the class of our error, or "!" and what went wrong."""

    number: int
    error: str
    seconds: float
    trace: str

    @property
    def bad(self) -> bool:
        return self.error.startswith("!")


def run(numbers: Iterable[int], seed: int) -> Iterator[Result]:
    """The results of cases; a process that ends or hangs is laid to the case it was at."""
    from fuzz import cases

    with tempfile.TemporaryDirectory() as folder:
        cases.prepare(Path(folder))
        worker = None
        for number in numbers:
            worker = worker or _start(seed, folder)
            result = _ask(worker, number)
            if result.error in ("!hangs", "!crash"):
                worker.kill()
                worker.communicate()
                worker = None
            yield result
        if worker:
            worker.communicate()


def _start(seed: int, sound: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fuzz.worker", str(seed), sound]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _ask(worker: subprocess.Popen, number: int) -> Result:
    assert worker.stdin and worker.stdout
    try:
        print(number, file=worker.stdin, flush=True)
        ready, _, _ = select.select([worker.stdout], [], [], TIMEOUT)
        line = worker.stdout.readline() if ready else None
    except BrokenPipeError:
        line = ""
    if line is None:
        return Result(number, "!hangs", TIMEOUT, "")
    if not line:
        return Result(number, "!crash", 0, f"exit status {worker.wait()}")
    result = Result(*json.loads(line))
    return result._replace(error="!slow") if result.seconds > SLOW and not result.bad else result


def table(results: list[Result]) -> str:
    """How many cases of each kind ended how."""
    from fuzz.cases import KINDS

    kinds = list(KINDS)
    counts = collections.Counter((kinds[r.number % len(kinds)], r.error) for r in results)
    ends = sorted({r.error for r in results})
    lines = ["".join(f"{end or 'loads':>18}" for end in ends) + "   kind"]
    for kind in kinds:
        lines.append("".join(f"{counts[kind, end]:>18}" for end in ends) + f"   {kind}")
    total = collections.Counter(r.error for r in results)
    lines.append("".join(f"{total[end]:>18}" for end in ends) + f"   all {len(results)}")
    lines.append(f"longest: {max(r.seconds for r in results):.2f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="the number of one case")
    asked = parser.parse_args()
    results = []
    for result in run(asked.only or range(asked.cases), asked.seed):
        results.append(result)
        if result.bad:
            print(
                f"case {result.number}: {result.error} {result.seconds:.1f} s\n{result.trace}",
                flush=True,
            )
    print(table(results))
    sys.exit(any(result.bad for result in results))


if __name__ == "__main__":
    main()
