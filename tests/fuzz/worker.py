"""Runs cases one after another, in a process of its own: numbers come in, results go out."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

MEMORY = 512 << 20
"""Bytes that a case may take."""


def main(seed: int, sound: Path) -> None:
    os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    os.environ["XLA_FLAGS"] = ""
    from fuzz import cases

    import flaxen
    from flaxen.core.errors import FlaxenError

    warnings.simplefilter("ignore")
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not stand among the results
    flaxen.load(sound / "shards1")
    cases.model()
    for line in sys.stdin:
        number = int(line)
        folder = Path(tempfile.mkdtemp()) / "case"
        _limit()
        start, error, trace = time.process_time(), "", ""
        try:
            cases.run(number, seed, sound, folder)
        except FlaxenError as found:
            error = type(found).__name__
        except BaseException as found:
            error = f"!{type(found).__name__}"
            trace = traceback.format_exc(limit=-4)[:3000]
        seconds = time.process_time() - start
        shutil.rmtree(folder.parent)
        print(json.dumps([number, error, round(seconds, 3), trace]), file=results, flush=True)


def _limit() -> None:
    """Let the process grow by so much and no more: beyond, memory errors show the fault."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
