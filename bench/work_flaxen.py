"""One side of `bench/run.py`: flaxen. Reads a JSON command per line, answers with a JSON line."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
from shapes import NEW, PROMPT, STEP, batch_of, folder
from worker import NOTES, serve

import flaxen
from flaxen.generate import generate
from flaxen.train.settings import TrainConfig
from flaxen.train.step import make_trainer, place_batch


def decode(dtype: str, batch: int) -> Callable[[], float]:
    """Seconds for NEW tokens after the first, for each of `batch` rows."""
    model = flaxen.load(folder(dtype))
    ids = np.random.default_rng(0).integers(3, 32000, (batch, PROMPT))

    def timed(new: int) -> float:
        start = time.perf_counter()
        generate(model, ids, max_new_tokens=new, eos_token_id=[])
        return time.perf_counter() - start

    return lambda: timed(NEW + 1) - timed(1)


def prefill(dtype: str, length: int) -> Callable[[], float]:
    """Seconds from a prompt of `length` tokens to the first new one."""
    model = flaxen.load(folder(dtype))
    ids = np.random.default_rng(0).integers(3, 32000, (1, length))

    def once() -> float:
        start = time.perf_counter()
        generate(model, ids, max_new_tokens=1, eos_token_id=[])
        return time.perf_counter() - start

    return once


def train(dtype: str, batch: int, length: int) -> Callable[[], float]:
    """Seconds for one AdamW step: float32 masters and moments, arithmetic in `dtype`."""
    model = flaxen.load(folder("float32"))
    config = TrainConfig(
        output="unused",
        steps=1000,
        batch_size=batch,
        seq_len=length,
        dtype=dtype,
        schedule="constant",
        **STEP,
    )
    trainer, state = make_trainer(model.module, model.runtime, config, 1000)
    ids = batch_of(batch, length)[None].astype(np.int32)
    targets = np.concatenate([ids[..., 1:], np.full((1, batch, 1), -100, np.int32)], -1)
    data = place_batch({"ids": ids, "targets": targets}, model.runtime)
    held = [state]

    def once() -> float:
        start = time.perf_counter()
        held[0], metrics = trainer.step(held[0], trainer.frozen, data)
        jax.block_until_ready((held[0], metrics))
        seconds = time.perf_counter() - start
        NOTES["loss"] = float(metrics["loss"])
        return seconds

    return once


if __name__ == "__main__":
    serve({"decode": decode, "prefill": prefill, "train": train}, f"jax {jax.__version__}")
