"""Devices to compile for: TPUs that are not here, virtual ones of this CPU, or what is here."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from flaxen.core.errors import PlanError
from flaxen.show.chips import CHIPS, Chip, chip_named, chip_of

QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""The environment in which the TPU's library compiles without looking for one."""

MOST = 4096
"""Virtual devices, each of which the CPU's runtime sets up."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for: `count` devices of a `chip` (None: not in the table), as the
    compiler of `platform` sees them; `virtual` where they stand in for others.
    """

    name: str
    count: int
    chip: Chip | None
    platform: str
    virtual: bool

    def devices(self) -> Sequence[Any]:
        """As jax's compiler takes them; nothing can be put on those of a TPU topology.

        Raises:
            PlanError: no compiler for that hardware, an unknown topology, or jax has begun already
            with fewer virtual devices.
        """
        if self.platform == "tpu" and self.virtual:
            return _tpus(self.name)
        here = jax.devices()
        if len(here) < self.count:
            raise PlanError(
                f"{self.count} devices are wanted and jax has begun with {len(here)}. Call "
                "`prepare` before anything else of jax, or set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={self.count}."
            )
        return here[: self.count]


def target(text: str | None) -> Target:
    """`v5p:2x2x2`, a TPU topology; `h100:8`, a number of GPUs, and `cpu:8`, both compiled for
    virtual devices of the CPU; None: the devices that are here.

    Raises:
        PlanError: anything else.
    """
    if text is None:
        here = jax.devices()
        chip = chip_of(here[0].device_kind)
        return Target(here[0].device_kind, len(here), chip, here[0].platform, virtual=False)
    name, colon, size = text.strip().lower().partition(":")
    if not colon or not re.fullmatch(r"\d+(x\d+)*", size):
        raise PlanError(
            f"{text!r} is no topology; expected for example v5p:2x2x2, h100:8 or cpu:8. Chips: "
            f"{', '.join(CHIPS)}."
        )
    count = math.prod(int(n) for n in size.split("x"))
    if not 1 <= count <= MOST:
        raise PlanError(f"{text!r} has {count} devices; expected 1 to {MOST}.")
    chip = None if name == "cpu" else chip_named(name)
    if chip is not None and chip.platform == "tpu":
        return Target(f"{chip.name}:{size}", count * _halves(chip), chip, "tpu", virtual=True)
    return Target(text, count, chip, "cpu", virtual=True)


def _halves(chip: Chip) -> int:
    """Devices that jax makes of one chip of a topology."""
    return 2 if chip.name == "7x" else 1


def prepare(wanted: Target) -> None:
    """Leave what is here alone, and split the CPU into as many devices as are wanted where it
    stands in for them; to be called before jax begins.
    """
    if wanted.virtual:
        jax.config.update("jax_platforms", "cpu")
    said = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if wanted.platform == "cpu" and wanted.virtual and not said:
        jax.config.update("jax_num_cpu_devices", wanted.count)


def can_compile(wanted: Target) -> bool:
    """Whether the compiler for it is installed."""
    if wanted.platform == "tpu" and wanted.virtual:
        return importlib.util.find_spec("libtpu") is not None
    return True


def _tpus(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            f"Compiling for {name} needs the TPU compiler: pip install 'flaxen[tpu-plan]'. Or ask "
            "for an estimate without it: --no-compile."
        )
    # There is no TPU to ask, or it is not to be asked; and nothing to say about that.
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    kind, _, _ = name.partition(":")
    # One device for each chip of a v4, as its programs have it.
    more = {"chip_config_name": "megacore"} if kind == "v4" else {}
    title = f"tpu{name}" if kind == "7x" else name
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=title, **more)
    except Exception as error:  # the runtime's own class, which jax does not export
        raise PlanError(f"The TPU compiler knows no topology {name}: {error}") from None
    return found.devices
