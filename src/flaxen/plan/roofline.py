"""How fast a step can be at best: by arithmetic, by memory, by what goes between devices."""

from __future__ import annotations

import dataclasses

from flaxen.plan.budget import Budget
from flaxen.plan.job import Job
from flaxen.show.chips import Chip
from flaxen.show.flops import decode_flops, model_flops


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds of one program, in seconds, on each device.

    flops: of the model, over all devices; computed: with what checkpointing computes again;
    compute, memory, links: what arithmetic, HBM and the links to other devices need alone, None
    where nothing is known of them.
    """

    program: str
    flops: float
    computed: float
    compute: float
    memory: float
    links: float | None

    @property
    def seconds(self) -> float:
        """If all three go on at once: no program is faster."""
        return max(self.compute, self.memory, self.links or 0.0)

    @property
    def bound(self) -> str:
        """What takes longest."""
        each = {"arithmetic": self.compute, "memory": self.memory, "links": self.links or 0.0}
        return max(each, key=lambda name: each[name])


def roofline(
    job: Job, program: str, budget: Budget, chip: Chip, sent: int | None
) -> tuple[Roofline, float]:
    """The bounds of a program and the most that MFU can be; sent: bytes that one device sends."""
    module, devices, peak = job.module, job.devices, chip.peak(job.computing)
    if program == "train":
        how = {"training": True, "trained": job.train}
        flops = model_flops(module, job.seq, job.batch, **how)
        again = model_flops(module, job.seq, job.batch, training=False) if job.remat else 0.0
    elif program == "prefill":
        flops, again = model_flops(module, job.seq, job.batch, training=False), 0.0
    else:
        flops, again = decode_flops(module, job.seq, job.batch), 0.0
    found = Roofline(
        program=program,
        flops=flops,
        computed=flops + again,
        compute=(flops + again) / devices / peak,
        memory=budget.traffic / chip.bandwidth,
        links=None if sent is None else sent / chip.links,
    )
    return found, flops / (devices * peak * found.seconds)
