"""What a forward pass keeps for the backward pass: asked of the derivative itself, on shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import AttentionSettings
from flaxen.core.platform import compiling_for
from flaxen.core.tree import is_param, paths
from flaxen.layers.checkpointing import checkpointing_of
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import whole_context
from flaxen.plan.job import Job
from flaxen.shard import plan_named


def kept(job: Job, remat: str | None, platform: str) -> list[jax.ShapeDtypeStruct]:
    """Every array that one micro-batch's derivative remembers, weights left out, over all devices.

    It is what `jax.vjp` closes over, so that any checkpointing policy and mechanism counts as it
    is.
    """
    # Nothing else of a job changes it: plans that are compared share the answer.
    alike = dataclasses.replace(
        job,
        mesh={},
        batch=job.micro_batch,
        accumulation=1,
        train="full",
        optimizer="sgd",
        remat=remat,
    )
    return _kept(alike, platform)


@functools.lru_cache(maxsize=64)
def _kept(job: Job, platform: str) -> list[jax.ShapeDtypeStruct]:
    runtime = Runtime(
        attention=AttentionSettings(job.attention), checkpointing=checkpointing_of(job.remat)
    )
    shape = (job.micro_batch, job.seq)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    tree = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, job.computing), job.module, is_leaf=is_param
    )

    def derivative(tree: Any, ids: jax.Array) -> Any:
        more = {"position_ids": ids, "segment_ids": ids} if job.packing else {}

        def loss(tree: Any) -> jax.Array:
            return tree.loss(ids, ids, whole_context(tree, shape, runtime, **more))[0]

        return jax.vjp(loss, tree)[1]

    with compiling_for(platform):
        found = jax.tree.leaves(jax.eval_shape(derivative, tree, ids))
    params = jax.tree.leaves(job.module, is_leaf=is_param)
    weights = {(p.shape, "layers" in p.axes) for p in params}
    return [x for x in found if not any(_is_weight(x.shape, *weight) for weight in weights)]


def _is_weight(shape: tuple[int, ...], weight: tuple[int, ...], stacked: bool) -> bool:
    """Whether a shape is a weight's, or has some of its neighbouring axes as one: so products take
    it. The axis of stacked layers stays.
    """
    if stacked:
        return shape[:1] == weight[:1] and _is_weight(shape[1:], weight[1:], False)
    sizes = list(weight)
    for size in shape:
        found = sizes.pop(0) if sizes else 0
        while sizes and found < size:
            found *= sizes.pop(0)
        if found != size:
            return False
    return not sizes and bool(shape)


def on_each(job: Job, found: list[jax.ShapeDtypeStruct]) -> int:
    """Their bytes on one device, each cut as the plan cuts activations of such sizes."""
    return sum(_share(job, x) for x in found)


def _share(job: Job, x: jax.ShapeDtypeStruct) -> int:
    rows, size = job.rows_ways, math.prod(x.shape) * x.dtype.itemsize
    dims, tokens = list(x.shape), rows * _ways(job, "seq")
    flat = job.micro_batch * job.seq
    if _taken(dims, job.micro_batch, job.seq) or _taken(dims, flat):
        size //= tokens
    elif dims[:1] == [1] and math.prod(dims[1:3]) == flat:
        # Rows in pieces, as the loss takes them: (shards, chunks, rows of a chunk).
        dims, size = dims[3:], size // tokens
    elif _taken(dims, job.micro_batch):
        size //= rows
    return size // max((ways for n, ways in inner(job).items() if n in dims), default=1)


def _taken(dims: list[int], *sizes: int) -> bool:
    """Take these axes out of `dims`, if it has them all."""
    rest = list(dims)
    for size in sizes:
        if size not in rest:
            return False
        rest.remove(size)
    dims[:] = rest
    return True


def inner(job: Job) -> dict[int, int]:
    """Sizes of axes that tensor and expert parallelism cut, and into how many pieces."""
    found: dict[int, int] = {}
    for path, param in paths(job.module, is_param).items():
        if "embed_tokens" in path:
            continue
        for axis, size in param.axes.items():
            ways = _ways(job, axis)
            if axis in ("heads", "kv_heads", "mlp", "experts") and ways > 1 and size % ways == 0:
                found[size] = max(found.get(size, 1), ways)
    return found


def _ways(job: Job, axis: str) -> int:
    rules = dict(plan_named(job.plan).activations)
    return math.prod(job.mesh.get(each, 1) for each in rules.get(axis, ()))
