"""Kill a training run at random moments, again and again: FOLDER [KILLS [SEED]].

After each kill every checkpoint that is seen must be whole; the run goes on from the last. When it
is through, losses, weights and moments must be those of a run that nobody killed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import interrupted_run
import numpy as np
from stored_state import stored_state

from flaxen.train.checkpoint import Checkpoints

STEPS = 60
MORE = {"steps": STEPS, "save_every": 1, "lora_targets": ["q_proj"], "resume": True}


def start(output: Path, data: Path) -> subprocess.Popen[bytes]:
    script = Path(interrupted_run.__file__)
    return subprocess.Popen([sys.executable, script, output, data, "never", json.dumps(MORE)])


def losses(output: Path) -> dict[int, float]:
    log = output / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def kill(output: Path, data: Path, chance: random.Random) -> bool:
    """Whether the run was killed before its end, up to a second after its first new step."""
    before, run = len(losses(output)), start(output, data)
    while run.poll() is None and len(losses(output)) == before:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 1))
    run.kill()
    return run.wait() != 0


def kill_runs(folder: Path, kills: int, seed: int) -> int:
    """How many steps were taken again."""
    chance, data = random.Random(seed), folder / "data.jsonl"
    texts = [" ".join(f"w{10 + (i * j) % 70}" for j in range(7)) for i in range(24)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert start(folder / "whole", data).wait() == 0
    again, output = 0, folder / "killed"
    for _ in range(kills):
        if not kill(output, data, chance):
            break
        steps = Checkpoints(output / "checkpoints", {}).steps()
        for step in steps:
            stored_state(output, step)
        again += max(losses(output), default=0) - max(steps, default=0)
    assert start(output, data).wait() == 0
    assert losses(output) == losses(folder / "whole")
    want, got = stored_state(folder / "whole", STEPS), stored_state(output, STEPS)
    assert want.keys() == got.keys()
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)
    assert not list((output / "checkpoints").glob("*tmp*"))
    return again


if __name__ == "__main__":
    place, kills, seed = (
        Path(sys.argv[1]),
        *map(int, (*sys.argv[2:], *(20, 0)[len(sys.argv) - 2 :])),
    )
    place.mkdir(parents=True)
    again = kill_runs(place, kills, seed)
    print(f"{kills} kills: {again} steps taken again, all else bit by bit as without")
