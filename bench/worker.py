"""A process that holds one workload at a time and times it when told to."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def serve(work: Mapping[str, Callable[..., Callable[[], float]]], about: str) -> None:
    """Answer `{"prepare": name, "with": {...}}` and `{"run": true}` until the input ends."""
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
            say({"first": time.perf_counter() - start})
        elif once is not None:
            say({"seconds": once()})
