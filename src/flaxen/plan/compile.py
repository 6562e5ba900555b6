"""Programs compiled from shapes, for devices that need not be here."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from flaxen.core.errors import PlanError
from flaxen.core.platform import compiling_for
from flaxen.core.tree import is_param
from flaxen.plan.job import Job, shapes
from flaxen.shard import Placement, make_mesh

LOWERED = {"gpu": "cuda"}
"""What the compiler calls a platform, where it is not what jax's devices say."""

NO_ROOM = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)\)? (?:of|exceeds available) ")
"""How the TPU's compiler says that memory is not enough, at either of two stages."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, in bytes on one device.

    arguments: what it is given, of which `aliased` is given back in place; temporary: what it needs
    while it runs; peak: all of it together. text: the program itself. fits: False where the
    compiler refused it for want of memory; then nothing but a least `peak` is known.
    """

    program: str
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    peak: int
    text: str = dataclasses.field(repr=False)
    fits: bool = True


def compile_step(job: Job, devices: Sequence[Any], platform: str) -> Compiled:
    """The training step of `flaxen.train`, compiled and not run."""
    from flaxen.train.step import make_trainer

    with compiling_for(platform):
        runtime = job.runtime(make_mesh(dict(job.mesh), devices))
        placement = _placed(runtime)
        trainer, state = make_trainer(shapes(job, placement), runtime, job.settings(), steps=1000)
        batch = batch_shapes(job, placement)
        return compile_program("train", trainer.step, (state, trainer.frozen, batch), platform)


def compile_inference(
    job: Job,
    devices: Sequence[Any],
    platform: str,
    programs: Sequence[str] = ("prefill", "decode"),
) -> list[Compiled]:
    """A prefill of whole rows and the decoding of one token a row, on a cache of `seq` slots."""
    from flaxen.models.causal import extend

    with compiling_for(platform):
        runtime = job.runtime(make_mesh(dict(job.mesh), devices))
        placement = _placed(runtime)
        module = shapes(job, placement)
        cache = cache_shapes(job, module, placement)

        def prefill(module: Any, ids: jax.Array, cache: Any) -> Any:
            valid = jnp.ones(ids.shape, bool)
            x, cache = extend(module, ids, cache, valid, runtime, fresh=True)
            return module.logits(x[:, -1], runtime).argmax(-1), cache

        def decode(module: Any, ids: jax.Array, cache: Any) -> Any:
            x, cache = extend(module, ids, cache, jnp.ones(ids.shape, bool), runtime)
            return module.logits(x[:, 0], runtime).argmax(-1), cache

        def ids(length: int) -> jax.ShapeDtypeStruct:
            where = placement.activation((job.batch, length), ("batch", "seq"))
            return jax.ShapeDtypeStruct((job.batch, length), jnp.int32, sharding=where)

        return [
            compile_program(
                function.__name__,
                jax.jit(function, donate_argnums=2),
                (module, ids(length), cache),
                platform,
            )
            for function, length in ((prefill, job.seq), (decode, 1))
            if function.__name__ in programs
        ]


def _placed(runtime: Any) -> Placement:
    assert runtime.placement is not None
    return runtime.placement


def batch_shapes(job: Job, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """A step's batch: int32 (accumulation, rows, tokens)."""
    shape = (job.accumulation, job.micro_batch, job.seq)
    spec = placement.activation_spec(shape[1:], ("batch", "seq"))
    where = NamedSharding(placement.mesh, PartitionSpec(None, *spec))
    keys = ("ids", "targets", *(("positions", "segments") if job.packing else ()))
    return {key: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where) for key in keys}


def cache_shapes(job: Job, module: Any, placement: Placement) -> Any:
    """An empty cache of the whole context, at its place."""
    found = module.cache_shapes(job.batch, job.seq, None, job.runtime(placement.mesh))
    axes = ("batch", "kv_heads", "keys", "head_dim")

    def place(x: Any) -> jax.ShapeDtypeStruct:
        if is_param(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.weight(x))
        stack = ("layers",) * (x.ndim - 4)
        names = (*stack, *axes) if x.ndim >= 4 else None
        where = placement.activation(x.shape, names) if names else placement.replicated()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(place, found, is_leaf=is_param)


def compile_program(
    name: str, function: Any, arguments: tuple[Any, ...], platform: str
) -> Compiled:
    """A jitted function compiled for shapes with shardings.

    Raises:
        PlanError: the compiler refuses it for another reason than memory.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lowered = function.trace(*arguments).lower(
            lowering_platforms=(LOWERED.get(platform, platform),)
        )
        # The text of some TPU programs cannot be asked for (jaxlib 0.10.2): it is written out.
        dump: Any = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            built = lowered.compile(compiler_options=dump)
        except Exception as error:  # the runtime's own class, which jax does not export
            return refused(name, str(error), time.perf_counter() - start)
        found = sorted(
            Path(folder).glob("*after_optimizations.txt"), key=lambda p: p.stat().st_size
        )
        text = found[-1].read_text() if found else ""
    memory = built.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return Compiled(
        program=name,
        seconds=time.perf_counter() - start,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        peak=peak,
        text=text,
    )


def refused(name: str, message: str, seconds: float) -> Compiled:
    """A program that the compiler found no room for.

    Raises:
        PlanError: any other refusal.
    """
    found = NO_ROOM.search(message)
    if found is None:
        raise PlanError(f"The {name} program does not compile: {message[:600]}") from None
    peak = int(float(found[1]) * UNITS[found[2]])
    return Compiled(name, seconds, 0, 0, 0, 0, peak, "", fits=False)
