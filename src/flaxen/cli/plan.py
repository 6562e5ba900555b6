"""`flaxen plan`: does it fit, and what will it cost, before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flaxen.cli.options import Count, Json, Source, about
from flaxen.cli.output import print_json, print_mark, print_out, remark
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.plan.report import Report

WORK = {"train": "a step", "prefill": "all prompts", "decode": "one token of each row"}
"""What each program does."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Work:
    """What is run."""

    train: Annotated[str, about("full, lora, or none for prefill and decoding.")] = "full"
    lora_rank: Annotated[Count, about("Inner width of adapters.")] = 8
    optimizer: Annotated[str, about("adamw, lion, sgd, momentum or adagrad.")] = "adamw"
    dtype: Annotated[str | None, about("What is computed in; default: as stored.")] = None
    remat: Annotated[
        str | None, about("What the backward pass computes again: block, dots, ...")
    ] = None
    attention: Annotated[str, about("An attention mechanism's name, or auto.")] = "auto"
    accumulation: Annotated[Count, about("Micro-batches that the rows of a step come in.")] = 1
    plan: Annotated[str | None, about("Name of a sharding plan; default: auto.")] = None
    no_packing: Annotated[bool, about("One document a row.")] = False


def plan(
    model: Source,
    *,
    mesh: Annotated[str, about("Devices by axis, for example fsdp=2,tp=4.")] = "fsdp=-1",
    batch: Annotated[Count, about("Rows of one step, over all devices.")] = 8,
    seq: Annotated[Count, about("Tokens of a row.")] = 4096,
    topology: Annotated[
        str | None, about("Hardware that is not here: v5p:2x2x2, v5e:16x16, h100:8.")
    ] = None,
    devices: Annotated[
        str | None, about("Virtual devices of this CPU: cpu:8, or just 8; default: what is here.")
    ] = None,
    hbm: Annotated[float | None, about("GiB of memory of one device, if not the chip's.")] = None,
    no_compile: Annotated[bool, about("Estimate from shapes alone.")] = False,
    revision: Annotated[str | None, about("Branch, tag or commit of a hub id.")] = None,
    work: Work = Work(),
    json: Json = False,
) -> int:
    """Tell whether a run fits, and what it costs: memory, collectives, operations, time at best.

    Of the model only config.json is read. The program is compiled for the hardware and not run. The
    exit status is 1 if it does not fit; then the nearest plan that does is printed.
    """
    if topology and devices:
        raise InputError("--topology and --devices both say what to compile for; give one of them.")
    if hbm is not None and not 0 < hbm < math.inf:
        raise InputError(f"--hbm is {hbm}; expected GiB above 0.")
    if devices is not None and devices.isdigit():
        devices = f"cpu:{devices}"
    from flaxen.plan.topology import prepare, target

    wanted = target(topology or devices)
    prepare(wanted)
    from flaxen.convert.formats.config_file import model_config
    from flaxen.plan.job import Job
    from flaxen.plan.report import planned
    from flaxen.shard.mesh import parse_mesh, resolve_sizes

    job = Job(
        config=model_config(model, revision=revision),
        mesh=resolve_sizes(parse_mesh(mesh), wanted.count),
        batch=batch,
        seq=seq,
        plan=work.plan,
        train=work.train,
        lora_rank=work.lora_rank,
        optimizer=work.optimizer,
        dtype=work.dtype,
        remat=work.remat,
        attention=work.attention,
        accumulation=work.accumulation,
        packing=not work.no_packing,
    )
    memory = None if hbm is None else int(hbm * 2**30)
    with _waiting(f"Compiling for {wanted.name}", not json):
        report = planned(job, wanted, memory=memory, compiled=not no_compile)
    if json:
        print_json(report.as_dict())
    else:
        _print(report)
    return int(report.fits is False)


def _waiting(text: str, shown: bool) -> Any:
    """A spinner on stderr; nothing where that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not shown)
    return console.status(text)


def _print(report: Report) -> None:
    from flaxen.show import human_bytes, human_number, human_seconds, table

    remark(report.title)
    for program in report.programs:
        rows = [(words, human_bytes(size)) for words, size in program.rows()]
        print_out(table([f"{program.name}: on each device", ""], rows))
        if program.collectives:
            lines = [
                (c.kind, "*".join(c.axes) or "?", c.devices, c.count, human_bytes(c.nbytes))
                for c in program.collectives
            ]
            headers = ["collective", "along", "devices", "times", "a device sends"]
            print_out(table(headers, lines))
        line = program.roofline
        if line is not None:
            times = {"arithmetic": line.compute, "memory": line.memory, "links": line.links}
            found = [(k, human_seconds(x)) for k, x in times.items() if x is not None]
            # One token after the other, memory is the limit, and MFU says nothing.
            most = "" if program.name == "decode" else f", MFU at most {program.mfu:.1%}"
            print_out(
                table(["at best", "time"], found),
                f"{human_number(line.flops)}FLOP for {WORK[program.name]}; "
                f"{human_seconds(line.seconds)} at best, bound by {line.bound}: "
                f"{program.tokens / line.seconds:,.0f} tokens/s{most}\n",
            )
        if program.seconds:
            remark(f"{program.name} compiled in {program.seconds:.0f} s")
    for note in report.notes:
        remark(note)
    if report.fits is None:
        print_out("Nothing is known of the device's memory: say --hbm.")
        return
    room = f"{human_bytes(report.needed)} of {human_bytes(report.memory or 0)}"
    print_mark(report.fits, f"{'fits' if report.fits else 'does not fit'}: {room} a device")
    for suggestion in report.suggestions:
        who = "compiled" if suggestion.compiled else "estimated"
        size = human_bytes(suggestion.needed)
        print_out(f"  fits: {' '.join(suggestion.words)}  ({size}, {who})")
    if not report.fits and not report.suggestions:
        print_out("No plan near this one fits.")
