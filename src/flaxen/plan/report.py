"""What a plan comes to: memory against what there is, what is sent, how fast it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flaxen.plan.budget import Budget, inference, training
from flaxen.plan.collectives import Collective, collectives, sent_bytes
from flaxen.plan.compile import Compiled, compile_inference, compile_step
from flaxen.plan.job import Job
from flaxen.plan.roofline import Roofline, roofline
from flaxen.plan.suggest import suggestions
from flaxen.plan.topology import Target, can_compile

WORDS = {
    "weights": "weights",
    "optimizer": "optimiser",
    "cache": "cache",
    "copies": "weights in what is computed in",
    "gradients": "gradients",
    "activations": "activations kept for the backward pass",
    "working": "one layer, or the loss, at work",
    "loaded": "weights as loaded, kept beside the masters",
}
ROOM = 0.98
"""Of a device's memory: the rest is the runtime's own."""
VERIFIED = 2
"""Suggestions that are compiled, until one is confirmed."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: by its budget, and as it was compiled, if it was.

    stand_in: for other hardware than is meant, so that what it sends counts and its memory does
    not.
    """

    name: str
    tokens: int
    budget: Budget
    compiled: Compiled | None
    collectives: tuple[Collective, ...]
    roofline: Roofline | None
    mfu: float
    stand_in: bool = False

    @property
    def seconds(self) -> float:
        """Of tracing and compiling."""
        return self.compiled.seconds if self.compiled else 0.0

    @property
    def needed(self) -> int:
        """Bytes on one device: the compiler's, where it was asked, and what it does not see."""
        if self.compiled is None or self.stand_in:
            return self.budget.total
        if not self.compiled.fits:
            # It stops at the first moment that is too much.
            return max(self.compiled.peak + self.budget.loaded, self.budget.total)
        return self.compiled.peak + self.budget.loaded

    def rows(self) -> list[tuple[str, int]]:
        """Words and bytes, for a table."""
        rows = [(WORDS[name], size) for name, size in self.budget.parts().items()]
        rows.append(("sum, estimated from shapes", self.budget.total))
        if self.compiled is not None and not self.stand_in:
            if self.compiled.fits:
                rows.append(("compiler: given to the program", self.compiled.arguments))
                rows.append(("compiler: temporary", self.compiled.temporary))
                rows.append(("needed, by the compiler", self.needed))
            else:
                rows.append(("at least, says the compiler, which refuses", self.compiled.peak))
        return rows

    def as_dict(self) -> dict[str, Any]:
        made = {
            "program": self.name,
            "tokens": self.tokens,
            "needed": self.needed,
            "estimate": {**self.budget.parts(), "total": self.budget.total},
            "traffic": self.budget.traffic,
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
        }
        if self.compiled is not None:
            facts = dataclasses.asdict(dataclasses.replace(self.compiled, text=""))
            made["compiled"] = {key: value for key, value in facts.items() if key != "text"}
        if self.roofline is not None:
            line = self.roofline
            more = {"seconds": line.seconds, "bound": line.bound, "mfu": self.mfu}
            made["roofline"] = dataclasses.asdict(line) | more
        return made


@dataclasses.dataclass(frozen=True)
class Offer:
    """A plan that fits: the options that change, what a device then needs, and who says so."""

    words: tuple[str, ...]
    needed: int
    compiled: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """fits: None where the memory of a device is not known. memory: bytes that may be used."""

    job: Job
    target: Target
    memory: int | None
    programs: tuple[Program, ...]
    suggestions: tuple[Offer, ...]
    notes: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes on one device, of the program that needs most."""
        return max(program.needed for program in self.programs)

    @property
    def fits(self) -> bool | None:
        if any(p.compiled is not None and not p.compiled.fits for p in self.programs):
            return False
        return None if self.memory is None else self.needed <= self.memory

    @property
    def title(self) -> str:
        """What is planned, in a line."""
        job = self.job
        how = {"full": "training", "lora": f"adapters of rank {job.lora_rank}", "none": "inference"}
        return (
            f"{job.config.get('model_type')}, {how[job.train]}: {job.batch} rows of {job.seq} "
            f"tokens, {job.mesh_text} on {self.target.name}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes are bytes on one device."""
        return {
            "fits": self.fits,
            "needed": self.needed,
            "memory": self.memory,
            "target": self.target.name,
            "devices": self.job.devices,
            "mesh": dict(self.job.mesh),
            "programs": [program.as_dict() for program in self.programs],
            "suggestions": [dataclasses.asdict(each) for each in self.suggestions],
            "notes": list(self.notes),
        }


def planned(job: Job, wanted: Target, *, memory: int | None, compiled: bool) -> Report:
    """The whole report. memory: bytes of a device, if not the chip's.

    Raises:
        PlanError: the program does not compile for another reason than memory.
    """
    if memory is None and wanted.chip is not None:
        memory = int(wanted.chip.memory * ROOM)
    notes = []
    if compiled and not can_compile(wanted):
        compiled = False
        notes.append(
            f"Estimated from shapes: compiling for {wanted.name} needs pip install "
            "'flaxen[tpu-plan]'."
        )
    if _stands_in(wanted):
        notes.append(
            f"Memory is estimated from shapes: the compiler for {wanted.name} needs its GPU, and "
            "the CPU's, which stands in, knows what is sent alone."
        )
    programs = _programs(job, wanted, compiled)
    report = Report(job, wanted, memory, programs, (), tuple(notes))
    if report.fits is False and memory is not None:
        report = dataclasses.replace(report, suggestions=_offers(report, compiled))
    return report


def _programs(job: Job, wanted: Target, compiled: bool) -> tuple[Program, ...]:
    if job.train == "none":
        budgets = inference(job)
    else:
        budgets = [training(job, wanted.platform)]
    built: Sequence[Compiled | None] = [None] * len(budgets)
    if compiled:
        devices, platform = wanted.devices(), wanted.platform
        if job.train == "none":
            built = compile_inference(job, devices, platform)
        else:
            built = [compile_step(job, devices, platform)]
    return tuple(_program(job, wanted, *pair) for pair in zip(budgets, built, strict=True))


def _program(job: Job, wanted: Target, budget: Budget, built: Compiled | None) -> Program:
    sends = tuple(collectives(built.text, job.mesh)) if built and built.text else ()
    line, mfu = None, 0.0
    if wanted.chip is not None:
        sent = sent_bytes(sends) if built and built.text else None
        line, mfu = roofline(job, budget.program, budget, wanted.chip, sent)
    tokens = job.batch * (1 if budget.program == "decode" else job.seq)
    return Program(budget.program, tokens, budget, built, sends, line, mfu, _stands_in(wanted))


def _stands_in(wanted: Target) -> bool:
    """Whether the CPU's compiler is asked in place of a GPU's, which needs its GPU."""
    return wanted.chip is not None and wanted.chip.platform != wanted.platform


def _offers(report: Report, compiled: bool) -> tuple[Offer, ...]:
    """The nearest plans that fit; the first of them is compiled too, on as many devices."""
    job, wanted, memory = report.job, report.target, report.memory or 0
    found = suggestions(job, _allowed(report), _estimate(job, wanted))
    offers = []
    for i, each in enumerate(found):
        sure = None
        if compiled and i < VERIFIED and each.job.devices == job.devices and not offers:
            sure = max(p.needed for p in _programs(each.job, wanted, compiled=True))
            if sure > memory:
                continue
        offers.append(Offer(each.changes, sure or each.budget.total, sure is not None))
    return tuple(offers)


def _allowed(report: Report) -> int:
    """What an estimate may come to: less than there is, by as much as this one was too low."""
    memory = report.memory or 0
    low = max(program.needed / max(program.budget.total, 1) for program in report.programs)
    return int(memory / max(low, 1.0))


def _estimate(job: Job, wanted: Target) -> Callable[[Job], Budget]:
    if job.train == "none":
        return lambda other: max(inference(other), key=lambda budget: budget.total)
    return lambda other: training(other, wanted.platform)
