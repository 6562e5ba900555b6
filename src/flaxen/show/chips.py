"""What known chips can do at most, for each device as jax counts them.

Sources, read 2026: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} and NVIDIA's data sheets
of A100 80GB, H100 and H200 (all SXM; dense, not sparse). GB and TB of NVIDIA are decimal.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import PlanError, did_you_mean

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """memory: bytes of HBM; bfloat16, float32, int8: peak operations a second; bandwidth: of HBM,
    bytes a second; links: bytes a second that leave it to its neighbours, in one direction.

    float32 is that of products as jax computes them by default: in one pass of bfloat16 on a TPU,
    in TF32 on a GPU.
    """

    name: str
    memory: int
    bfloat16: float
    float32: float
    int8: float
    bandwidth: float
    links: float
    kinds: str
    platform: str

    def peak(self, dtype: Any) -> float:
        """Operations a second in a dtype."""
        size = jnp.dtype(dtype).itemsize
        return {1: self.int8, 2: self.bfloat16}.get(size, self.float32)


def _tpu(
    name: str, gib: float, tera: float, int8: float, gbps: float, ici: float, kinds: str
) -> Chip:
    """ici: Google names both directions together."""
    peak = tera * TERA
    memory, links = int(gib * GIB), ici / 2 * GIGA
    return Chip(name, memory, peak, peak, int8 * TERA, gbps * GIGA, links, kinds, "tpu")


def _gpu(
    name: str, gb: float, tera: float, tf32: float, int8: float, tbps: float, nvlink: float
) -> Chip:
    """nvlink: NVIDIA names both directions together."""
    figures = (tera * TERA, tf32 * TERA, int8 * TERA, tbps * TERA, nvlink / 2 * GIGA)
    return Chip(name, int(gb * GIGA), *figures, kinds=rf"\b{name}\b", platform="gpu")


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 32, 275, 275, 1200, 600, r"TPU v4$"),
        _tpu("v5e", 16, 197, 393, 819, 400, r"TPU v5 ?(lite|e)"),
        _tpu("v5p", 95, 459, 918, 2765, 1200, r"TPU v5p?$"),
        _tpu("v6e", 32, 918, 1836, 1638, 800, r"TPU v6 ?(lite|e)"),
        # jax counts each of a chip's two halves as a device.
        _tpu("7x", 192 / 2, 2307 / 2, 4614 / 2, 7380 / 2, 1200 / 2, r"TPU ?v?7x?"),
        _gpu("A100", 80, 312, 156, 624, 2.039, 600),
        _gpu("H100", 80, 989, 494, 1979, 3.35, 900),
        _gpu("H200", 141, 989, 494, 1979, 4.8, 900),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of that name, in whatever case.

    Raises:
        PlanError: no such chip.
    """
    known = {each.lower(): chip for each, chip in CHIPS.items()}
    if name.lower() not in known:
        raise PlanError(f"There is no chip {name!r} in the table.{did_you_mean(name, CHIPS)}")
    return known[name.lower()]


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls so (`TPU v5 lite`, `NVIDIA H100 80GB HBM3`), if it is known."""
    found = (c for c in CHIPS.values() if re.search(c.kinds, device_kind, re.IGNORECASE))
    return next(found, None)


def peak_flops(device_kind: str, dtype: Any = "bfloat16") -> float | None:
    """The most operations a second that one device can do in products of a dtype: by the table, or
    on CPU as measured here, once a process; None for a device that is not known.
    """
    chip = chip_of(device_kind)
    if chip is not None:
        return chip.peak(dtype)
    return measured_peak(str(jnp.dtype(dtype))) if device_kind.lower() == "cpu" else None


@functools.cache
def measured_peak(dtype: str = "float32", width: int = 1024, tries: int = 5) -> float:
    """Operations a second of a large product on the default device: the best of some tries."""
    x = jnp.asarray(np.ones((width, width), np.float32), dtype)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(x, x))
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, x))
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best
