"""One of two processes that share a model: PORT INDEX SOURCE TARGET REPORT.

They load it, save it to TARGET, generate, take a training step and save the result beside TARGET.
Writes to REPORT the bytes of weights that it read, those of its devices' boxes, how a save ends
that fails on the second process only, new tokens, the loss, and what is told of rewards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (sets the environment before jax starts)
import jax
import numpy as np

import flaxen
from flaxen.core.errors import FlaxenError, RewardError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.train.data.prompts import Asked
from flaxen.train.objectives.rewards import Rewards
from flaxen.train.objectives.rollout import Rollout
from flaxen.train.settings import TrainConfig
from flaxen.train.step import make_trainer, place_batch, trained_tree

PROMPTS = np.arange(10, 34, dtype=np.int32).reshape(4, 6)


def main(port: str, index: str, source: str, target: str, report: str) -> None:
    # Read when the first device is asked for.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=60)
    # Each process is one half of tp: what tp does not cut, both have.
    model = flaxen.load(source, mesh="tp=2,fsdp=4", scan_layers=True)
    assert model.loading is not None
    boxes = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
    )
    model.save(target, max_shard_size="100KB")

    def full(_: int) -> None:
        if index == "1":
            raise OSError(28, "No space left on device")

    try:
        model.save(target, progress=full)
    except FlaxenError as error:
        said = {"read": model.loading.bytes_read, "boxes": boxes, "error": str(error)}
        said["tokens"] = model.generate(PROMPTS, max_new_tokens=4).tolist()
        trained, said["loss"] = one_step(model)
        trained.save(Path(target).with_name("trained"))
        said["rewards"] = judged(float(index))
        Path(report).write_text(json.dumps(said))


def judged(mine: float) -> dict[str, Any]:
    """Rewards of a function that gives each process others, and how it ends when it fails."""
    calls = []

    def reward(completion_ids: list[list[int]]) -> list[float | None]:
        calls.append(completion_ids)
        if len(calls) > 1:
            raise OSError("no judge")
        return [0.25, None, mine]

    rewards = Rewards(reward, None)
    rollout = Rollout([Asked("a", [1], {})] * 3, [[2]] * 3, ["b"] * 3, np.zeros(3, bool))
    table = rewards(rollout, "step 1")
    try:
        rewards(rollout, "step 2")
    except RewardError as error:
        return {"table": str(table.ravel().tolist()), "calls": len(calls), "error": str(error)}
    raise AssertionError("a function failed and nobody said so")


def one_step(model: Any) -> tuple[Any, float]:
    """The model after a step of plain gradient descent on the prompts, and the loss before it."""
    config = TrainConfig(output="unused", optimizer="sgd", schedule="constant", learning_rate=0.1)
    trainer, state = make_trainer(model.module, model.runtime, config, 1)
    targets = np.pad(PROMPTS[:, 1:], [(0, 0), (0, 1)], constant_values=IGNORED)
    batch = place_batch({"ids": PROMPTS[None], "targets": targets[None]}, model.runtime)
    state, metrics = trainer.step(state, trainer.frozen, batch)
    return model.replace(module=trained_tree(state, model.module)), float(metrics["loss"])


if __name__ == "__main__":
    main(*sys.argv[1:])
