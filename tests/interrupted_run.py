"""A run in a process of its own that is killed: OUTPUT DATA WHEN [SETTINGS].

WHEN is a step after the first checkpoint, of step 4; or `writing`: while the checkpoint of step 8
is written; or `never`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import conftest  # noqa: F401  (sets the environment before jax starts)
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.train import train

SETTINGS = {
    "steps": 10,
    "batch_size": 2,
    "accumulation": 2,
    "seq_len": 8,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "warmup": 2,
    "save_every": 4,
    "lora_rank": 2,
    "progress": False,
}


def main(output: str, data: str, when: str, more: str = "{}") -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(output) / "checkpoints"

    def on_step(row: dict) -> None:
        if str(row["step"]) == when:
            # It is written in the background.
            while not (folder / "step_00000004").exists():
                time.sleep(0.0005)
            kill()

    def watch() -> None:
        while not (list(folder.glob("step_00000008*tmp*"))):
            time.sleep(0.0005)
        kill()

    if when == "writing":
        threading.Thread(target=watch, daemon=True).start()
    settings = SETTINGS | json.loads(more)
    train(tiny(), word_tokenizer(90), data, output=output, on_step=on_step, **settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
