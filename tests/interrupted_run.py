"""A run in a process of its own that is killed at a step: OUTPUT DATA STEP."""

from __future__ import annotations

import os
import signal
import sys

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


def main(output: str, data: str, step: str) -> None:
    def on_step(row: dict) -> None:
        if row["step"] == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    train(tiny(), word_tokenizer(90), data, output=output, on_step=on_step, **SETTINGS)


if __name__ == "__main__":
    main(*sys.argv[1:])
