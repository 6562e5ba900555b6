"""Compiles Llama-3-8B for a TPU that is not here, under every mechanism that takes it there.

    python conformance/tpu_compile.py [--topology v5p:2x2x2] [--mesh fsdp=8] [--only splash ...]

Needs the libtpu package, and no TPU. Prints memory per device, collectives and compile time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from flaxen.core.errors import FlaxenError
from flaxen.core.platform import compiling_for
from flaxen.models.causal import whole_context
from flaxen.plan import Job, target
from flaxen.plan.collectives import collectives
from flaxen.plan.compile import Compiled, compile_inference, compile_program, compile_step
from flaxen.plan.job import shapes
from flaxen.shard import make_mesh, parse_mesh

CONFIG = Path(__file__).parents[1] / "tests/plan/configs/llama-3-8b.json"
MECHANISMS = ("splash", "flash", "pallas_flash", "ring", "blockwise", "sdpa")
HEAD = f"{'mechanism':<13}{'program':<9}{'mesh':<14}{'s':>6}  arguments  temporary  collectives"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--mesh", default="fsdp=8", help="of all but the ring")
    parser.add_argument("--ring-mesh", default="fsdp=2,sp=4")
    parser.add_argument("--only", nargs="*", default=MECHANISMS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chips = target(args.topology).devices()
    if not args.json:
        size = f"{args.rows} rows of {args.length}"
        print(f"Llama-3-8B, {size}, on {args.topology}, jax {jax.__version__}")
        print(HEAD)
    for name in args.only:
        mesh = args.ring_mesh if name.endswith("ring") else args.mesh
        job = Job(
            config=json.loads(CONFIG.read_text()),
            mesh=parse_mesh(mesh),
            batch=args.rows,
            seq=args.length,
            remat="block",
            attention=name,
            packing=False,
        )
        for program in (forward, train, decode):
            row = {"mechanism": name, "program": program.__name__, "mesh": mesh}
            row |= said(program, job, chips)
            print(json.dumps(row) if args.json else line(row), flush=True)


def said(program: Any, job: Job, chips: Sequence[Any]) -> dict[str, Any]:
    """What the compiler says about one program, or why there is none."""
    try:
        found: Compiled = program(job, chips)
    except (FlaxenError, ValueError, NotImplementedError) as error:
        return {"seconds": 0.0, "error": f"{type(error).__name__}: {error}"[:300]}
    counts: dict[str, int] = {}
    for each in collectives(found.text, job.mesh):
        counts[each.kind] = counts.get(each.kind, 0) + each.count
    return {
        "seconds": found.seconds,
        "arguments": found.arguments,
        "temporary": found.temporary,
        "collectives": counts,
    }


def line(row: dict[str, Any]) -> str:
    head = f"{row['mechanism']:<13}{row['program']:<9}{row['mesh']:<14}{row['seconds']:>6.1f}"
    if "error" in row:
        return f"{head}  {row['error']}"
    sizes = "".join(f"{row[key] / 2**30:>7.2f} GiB" for key in ("arguments", "temporary"))
    kinds = ", ".join(f"{kind} {count}" for kind, count in row["collectives"].items())
    return f"{head}{sizes}  {kinds or 'none'}"


def forward(job: Job, chips: Sequence[Any]) -> Compiled:
    """The scoring of whole sequences."""
    with compiling_for("tpu"):
        run = job.runtime(make_mesh(dict(job.mesh), chips))
        assert run.placement is not None
        module = shapes(dataclasses.replace(job, train="none"), run.placement)

        def score(decoder: Any, ids: jax.Array, targets: jax.Array) -> jax.Array:
            return decoder.loss(ids, targets, whole_context(decoder, ids.shape, run))[0]

        shape = (job.batch, job.seq)
        where = run.placement.activation(shape, ("batch", "seq"))
        ids = jax.ShapeDtypeStruct(shape, jax.numpy.int32, sharding=where)
        return compile_program("forward", jax.jit(score), (module, ids, ids), "tpu")


def train(job: Job, chips: Sequence[Any]) -> Compiled:
    """A step of Adam on float32 masters."""
    return compile_step(job, chips, "tpu")


def decode(job: Job, chips: Sequence[Any]) -> Compiled:
    """One token for each row on a cache of `length` slots."""
    return compile_inference(
        dataclasses.replace(job, train="none"), chips, "tpu", programs=("decode",)
    )[0]


if __name__ == "__main__":
    main()
