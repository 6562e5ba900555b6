"""What a step costs: its share of what the devices could do, and their memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.layers.runtime import Runtime
from flaxen.show.chips import chip_of, measured_peak
from flaxen.show.flops import model_flops
from flaxen.show.memory import peak_memory
from flaxen.train.settings.seeing import MEASURED
from flaxen.tune import adapters


class Costs:
    """MFU as PaLM defines it (arXiv 2204.02311, appendix B): operations of the model's own forward
    and backward pass, by the time of the step and the peak of all devices. What an objective
    computes besides, as with a reference or by generating, and what is computed twice to save
    memory, is none of them.

    peak: operations a second of one device, `measured`, or None for that of a known chip.
    """

    def __init__(self, tree: Any, runtime: Runtime, peak: float | str | None, dtype: Any = None):
        self.tree = tree
        self.trained = "lora" if adapters(tree) else "full"
        mesh = None if runtime.placement is None else runtime.placement.mesh
        one = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        self.count = 1 if mesh is None else mesh.size
        self.peak = _peak(one.device_kind, peak, dtype or _dtype(tree))
        self.counted: dict[tuple[int, ...], float] = {}

    def flops(self, batch: Any) -> float | None:
        """Operations of a step on a batch (accumulation, rows, tokens); None if no peak is known
        to compare them with, or the batch has no ids.
        """
        if self.peak is None or "ids" not in batch:
            return None
        *rows, tokens = shape = batch["ids"].shape
        if shape not in self.counted:
            self.counted[shape] = model_flops(
                self.tree, tokens, math.prod(rows), trained=self.trained
            )
        return self.counted[shape]

    def told(self, flops: float | None, seconds: float) -> dict[str, float]:
        """What a row of the log says of it."""
        told: dict[str, float] = {"memory_bytes": peak_memory()}
        if flops is not None and self.peak is not None:
            told["mfu"] = flops / (seconds * self.peak * self.count)
        return told


def _peak(kind: str, asked: float | str | None, dtype: Any) -> float | None:
    if asked == MEASURED:
        return measured_peak(str(jnp.dtype(dtype)))
    if asked is not None:
        return float(asked)
    chip = chip_of(kind)
    return None if chip is None else chip.peak(dtype)


def _dtype(tree: Any) -> Any:
    """What most of the model's numbers are computed in."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return max(floats, key=lambda x: x.size).dtype if floats else jnp.float32
