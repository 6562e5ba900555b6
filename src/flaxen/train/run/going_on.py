"""What must be so before a run goes on from a checkpoint, or several processes begin one."""

from __future__ import annotations

import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.convert.together import Processes
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.layers.runtime import Runtime
from flaxen.train.checkpoint import Checkpoints
from flaxen.train.optim import learning_rate
from flaxen.train.settings import TrainConfig


def check_processes(checkpoints: Checkpoints, runtime: Runtime, steps: int) -> None:
    """
    Raises:
        ConfigError: processes that train together, but share no mesh or differ in their settings.
        CheckpointError: they see different checkpoints.
    """
    if jax.process_count() == 1:
        return
    if runtime.placement is None or runtime.placement.mesh.size < jax.device_count():
        raise ConfigError(
            f"{jax.process_count()} processes train one model, but it is not on all their devices. "
            "Load it onto a mesh of them all: mesh='fsdp=-1'."
        )
    settings = json.dumps(checkpoints.settings | {"steps": steps}, sort_keys=True)
    last = ([0, *checkpoints.steps()])[-1]
    said = Processes().gather(f"{zlib.crc32(settings.encode()):08x} {last}")
    first = said[0].split()
    for index, one in enumerate(said):
        numbers = one.split()
        if numbers[0] != first[0]:
            raise ConfigError(
                f"Process {index} has other settings, another model or other data than process 0. "
                "Give all of them the same."
            )
        if numbers[1] != first[1]:
            raise CheckpointError(
                f"Process {index} sees a checkpoint of step {numbers[1]} in {checkpoints.folder}, "
                f"process 0 one of {first[1]}. They need a folder that all of them see."
            )


def check_steps(checkpoints: Checkpoints, config: TrainConfig, steps: int) -> None:
    """A run may be made longer or shorter if that changes nothing of what was done.

    Raises:
        CheckpointError: the steps so far had another learning rate, or are too many already.
    """
    about, (*_, done) = checkpoints.about(), checkpoints.steps()
    before = about.get("steps", steps)
    if before == steps:
        return
    where = f"{checkpoints.path(done)} is of a run of {before} steps, this one has {steps}"
    if steps < done:
        raise CheckpointError(f"{where}: less than were taken.")
    taken = jnp.arange(done)
    was, now = (np.asarray(learning_rate(config, n)(taken)) for n in (before, steps))
    if not np.array_equal(was, now):
        raise CheckpointError(
            f"{where}, and {config.schedule} would have had another learning rate until here. "
            f"Resume with steps={before}; or take a schedule that can be made longer, constant or "
            "wsd before it falls."
        )
