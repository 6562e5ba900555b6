"""Bytes on one device, from shapes and shardings alone: before anything is compiled.

What a program is given is exact. What it needs while it runs is the larger of two moments: the
loss, when the gradient of the scores' weight is summed, and the backward pass through a layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.platform import compiling_for
from flaxen.core.tree import is_param, paths, walk
from flaxen.layers.routers import Router
from flaxen.models.fold import Folded
from flaxen.plan.job import Job, shapes, turns
from flaxen.plan.residuals import kept, on_each
from flaxen.shard import Placement, plan_named

GATHERED = ("dp", "fsdp", "sp")
"""Mesh axes along which weights are cut to be stored, and gathered to be used."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """weights: as the step is given them; optimizer: its moments; copies: the weights in what is
    computed in; gradients, activations and working: at the moment that needs most; cache: of
    inference; loaded: the weights that were read, which a run keeps beside its masters. traffic:
    bytes that a step moves to and from memory at least.
    """

    program: str
    weights: int
    optimizer: int = 0
    copies: int = 0
    gradients: int = 0
    activations: int = 0
    working: int = 0
    cache: int = 0
    loaded: int = 0
    traffic: int = 0

    @property
    def arguments(self) -> int:
        """What the program is given."""
        return self.weights + self.optimizer + self.cache

    @property
    def temporary(self) -> int:
        """What it needs besides while it runs."""
        return self.copies + self.gradients + self.activations + self.working

    @property
    def program_bytes(self) -> int:
        """What the compiler counts."""
        return self.arguments + self.temporary

    @property
    def total(self) -> int:
        """What the device has to hold."""
        return self.program_bytes + self.loaded

    def parts(self) -> dict[str, int]:
        """Where it goes; what takes nothing is left out."""
        names = ("weights", "optimizer", "cache", "copies", "gradients", "activations", "working")
        every = {name: getattr(self, name) for name in (*names, "loaded")}
        return {name: size for name, size in every.items() if size}


def training(job: Job, platform: str) -> Budget:
    """Of a step of `flaxen.train`."""
    from flaxen.train.step import make_trainer

    with compiling_for(platform):
        runtime = job.runtime(job.paper())
        assert runtime.placement is not None
        tree = shapes(job, runtime.placement)
        trainer, state = make_trainer(tree, runtime, job.settings(), steps=1000)
    trained = jax.tree.leaves(state.trained)
    full, narrow = job.train == "full", job.computing.itemsize
    weights = held([*trained, *jax.tree.leaves(trainer.frozen)])
    optimizer = held(jax.tree.leaves(state.opt_state))
    copies = held(trained, narrow) if full and job.computing != jnp.float32 else 0
    moments = _moments(job, platform, trained)
    gradients, activations, working = max(moments, key=sum)
    return Budget(
        program="train",
        weights=weights,
        optimizer=optimizer,
        copies=copies,
        gradients=gradients,
        activations=activations,
        working=working,
        loaded=held(jax.tree.leaves(tree)) if full else 0,
        traffic=2 * (held(trained) + optimizer)
        + copies
        + 2 * activations
        + gathered(job) * job.accumulation * (3 if job.remat else 2),
    )


def _moments(job: Job, platform: str, trained: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Gradients, kept activations and what else is there, at the loss and in the backward pass."""
    full, narrow = job.train == "full", job.computing.itemsize
    sums = held(trained, 4) if job.accumulation > 1 else 0
    plain, head = kept(job, None, platform), _head(job)
    saved = on_each(job, plain if job.remat is None else kept(job, job.remat, platform))
    # The scores' weight is gathered, and each device sums its gradient in float32; the sum is there
    # twice when the others are sent their parts of it.
    loss = (sums + head * (4 + narrow) * full, saved, head * (4 if full else narrow))
    layers = [x for x in plain if x.shape[:1] == (turns(job.module),)]
    layer = on_each(job, layers) // max(turns(job.module), 1)
    # Half of what a layer computes again is there at once, beside two products that make gradients.
    products = 2 * 4 * largest_weight(job) * full
    backward = (sums + held(trained, narrow), saved, layer // 2 + products + largest_weight(job))
    return [loss, backward]


def inference(job: Job) -> list[Budget]:
    """Of a prefill and of decoding."""
    from flaxen.plan.compile import cache_shapes

    runtime = job.runtime(job.paper())
    assert runtime.placement is not None
    module = shapes(job, runtime.placement)
    cache = held(jax.tree.leaves(cache_shapes(job, module, runtime.placement)))
    weights, narrow = held(jax.tree.leaves(module)), job.computing.itemsize
    wide = _widest(job)

    def one(program: str, tokens: int) -> Budget:
        rows = job.batch * tokens // job.rows_ways
        # A layer's weights are gathered, or the scores'; a decoding loop writes the cache anew.
        anew = cache if tokens == 1 else 0
        working = max(gathered_layer(job), _head(job) * narrow) + anew + rows * wide * narrow
        scores = job.batch // job.rows_ways * _head(job) // _embed(job) * 4
        return Budget(
            program=program,
            weights=weights,
            cache=cache,
            working=working + scores,
            traffic=gathered(job) + (cache if tokens == 1 else 0),
        )

    return [one("prefill", job.seq), one("decode", 1)]


def held(leaves: Iterable[Any], itemsize: int | None = None) -> int:
    """Bytes on one device of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * (itemsize or x.dtype.itemsize) for x in leaves
    )


def _whole(job: Job) -> Placement:
    """The plan without the axes along which weights are gathered."""
    mesh = {axis: 1 if axis in GATHERED else size for axis, size in job.mesh.items()}
    paper: Any = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    return Placement(paper, plan_named(job.plan))


def gathered(job: Job) -> int:
    """Bytes of all weights as products use them."""
    place, narrow = _whole(job).weight, job.computing.itemsize
    found = paths(job.module, is_param).values()
    return sum(math.prod(place(p).shard_shape(p.shape)) * narrow for p in found)


def gathered_layer(job: Job) -> int:
    """Bytes of the weights of one layer as products use them: the largest of each period."""
    place, narrow = _whole(job).weight, job.computing.itemsize
    layers = job.module.layers
    blocks = layers.body if isinstance(layers, Folded) else layers
    sizes = [
        sum(math.prod(place(p).shard_shape(p.shape)) * narrow for p in paths(b, is_param).values())
        for b in blocks
    ]
    return max(sizes, default=0) // turns(job.module)


def largest_weight(job: Job) -> int:
    """Numbers of the largest weight of a layer when it is gathered."""
    place = _whole(job).weight
    found = paths(job.module.layers, is_param).values()
    one = lambda p: math.prod(place(p).shard_shape(p.shape)) // p.axes.get("layers", 1)
    return max(map(one, found), default=0)


def _head(job: Job) -> int:
    """Numbers of the scores' weight on one device when it is gathered."""
    module = job.module
    part = module.embed_tokens if module.lm_head is None else module.lm_head
    return math.prod(_whole(job).weight(part.weight).shard_shape(part.weight.shape))


def _embed(job: Job) -> int:
    return job.module.embed_tokens.weight.shape[-1]


def _widest(job: Job) -> int:
    """Channels of a token's widest moment in a layer: twice what a feed-forward network, or the
    experts that it goes through, makes of it, and the stream.
    """
    place, embed = _whole(job).weight, _embed(job)
    chosen = max(
        (part.k for part in walk(job.module.layers) if isinstance(part, Router)), default=1
    )
    widths = [
        math.prod(place(p).shard_shape(p.shape))
        * (chosen if "experts" in p.axes else 1)
        // (p.axes["embed"] * p.axes.get("layers", 1) * p.axes.get("experts", 1))
        for p in paths(job.module.layers, is_param).values()
        if "embed" in p.axes
    ]
    return 2 * max(widths, default=0) + 4 * embed
