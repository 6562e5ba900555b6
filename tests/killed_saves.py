"""Kill saves at random moments, again and again: FOLDER [KILLS [SEED]].

After each kill the folder must load as the old checkpoint or the new one, with all its bytes; what
the kill left beside it must be gone after the next save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.save import write_checkpoint

KEPT = "notes.txt"


class Constant(LazyTensor):
    def __init__(self, value: int, rows: int):
        self.value, self.shape, self.dtype = value, (rows, 1 << 10), np.dtype(np.int32)

    def fill(self, box, out):
        out[...] = self.value


def save(folder: Path, version: int) -> None:
    """A checkpoint every value of which is its version; odd ones have fewer, other files."""
    rows = [40, 50, 60, 70] if version % 2 else [90, 30]
    tensors = {f"w{i}": Constant(version, n) for i, n in enumerate(rows)}
    write_checkpoint(tensors, folder, config={"version": version}, max_shard_size="300KB")


def version(folder: Path) -> int:
    """Which version a folder holds, once each value of it has been seen to be of that one."""
    with open_checkpoint(folder) as checkpoint:
        found = checkpoint.config["version"]
        assert len(checkpoint) == (4 if found % 2 else 2), list(checkpoint)
        for name, tensor in checkpoint.items():
            assert (tensor.read() == found).all(), (name, found)
    assert (folder / KEPT).read_text() == "mine"
    return found


def killed_save(folder: Path, version: int, after: float) -> bool:
    """Whether a process that saves was killed before it had ended."""
    child = os.fork()
    if child == 0:
        save(folder, version)
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_saves(folder: Path, kills: int, seed: int) -> Counter[str]:
    """How many kills left the old folder, and how many the new one."""
    save(folder, 0)
    (folder / KEPT).write_text("mine")
    start = time.perf_counter()
    save(folder, 0)
    duration = time.perf_counter() - start
    chance, left, old = random.Random(seed), Counter(), 0
    while left.total() < kills:
        if not killed_save(folder, old + 1, chance.uniform(0, 1.5 * duration)):
            old += 1
            continue
        found = version(folder)
        assert found in (old, old + 1), (found, old)
        left["new" if found > old else "old"] += 1
        old = found
    old += 1
    save(folder, old)
    assert version(folder) == old
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return left


if __name__ == "__main__":
    place, kills, seed = Path(sys.argv[1]), *map(int, (*sys.argv[2:], 50, 0)[:2])
    left = kill_saves(place / "out", kills, seed)
    print(f"{kills} kills: {left['old']} left the old checkpoint, {left['new']} the new one")
