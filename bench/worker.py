"""A process that holds one workload at a time and times it when told to."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NOTES: dict[str, Any] = {}
"""What a workload adds to the answer to its latest run, as the loss of a step."""


def serve(work: Mapping[str, Callable[..., Callable[[], float]]], about: str) -> None:
    """Answer `{"prepare": name, "with": {...}}` and `{"run": true}` until the input ends.

    Each answer has the peak of this process's memory in bytes: that of preparing (loading,
    compiling, the first run), and then that of each run.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    once: Callable[[], float] | None = None
    say = lambda value: print(json.dumps(value), file=out, flush=True)
    say({"about": about})
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        if "prepare" in command:
            once = None
            gc.collect()
            once = work[command["prepare"]](**command["with"])
            start = time.perf_counter()
            once()
            say({"first": time.perf_counter() - start, "peak": peak(), **NOTES})
        elif once is not None:
            gc.collect()
            forget_peak()
            say({"seconds": once(), "peak": peak(), **NOTES})


def peak() -> int | None:
    """The most memory that this process has held since `forget_peak`, in bytes; None where the
    system does not tell.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Count the peak from what is held now (Linux: `clear_refs` of proc_pid_clear_refs(5))."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
