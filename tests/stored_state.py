"""What lies in a run's checkpoint, whatever mesh it was written from."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flaxen.train.checkpoint import Checkpoints


def stored_state(output: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by path."""
    folder = Checkpoints(output / "checkpoints", {}).path(step) / "state"
    with ocp.StandardCheckpointer() as reader:
        found = reader.metadata(folder).item_metadata.tree
        arrays = reader.restore(folder, {k: jnp.zeros(x.shape, x.dtype) for k, x in found.items()})
    return {path: np.asarray(x) for path, x in arrays.items()}
