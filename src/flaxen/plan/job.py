"""What is planned: a model of shapes, a mesh, and how it is trained or run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from flaxen.attention import AttentionSettings
from flaxen.core.checks import at_least, one_of
from flaxen.core.errors import ConfigError, PlanError
from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.checkpointing import checkpointing_of
from flaxen.layers.runtime import Runtime
from flaxen.models.fold import Folded, folded, in_body, stack_params
from flaxen.models.skeleton import only_generating
from flaxen.shard import Placement, plan_named
from flaxen.train.settings import TrainConfig
from flaxen.tune.leaf import LowRank, scale_of
from flaxen.tune.lora import map_linears
from flaxen.tune.targets import matching

TRAIN = ("full", "lora", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run on paper.

    config: the keys of config.json; mesh: sizes by axis, without -1; batch: rows of one step
    over all devices, `accumulation` micro-batches together; seq: tokens of a row. train: `full`,
    `lora`, or `none` for prefill and decoding. dtype: what is computed in; None: as stored.

    Raises:
        ConfigError: naming what is out of range; a batch that no mesh axis can cut evenly.
    """

    config: Mapping[str, Any] = dataclasses.field(hash=False)
    mesh: Mapping[str, int] = dataclasses.field(hash=False)
    batch: int
    seq: int
    plan: str | None = None
    train: str = "full"
    lora_rank: int = 8
    optimizer: str = "adamw"
    dtype: str | None = None
    remat: str | None = None
    attention: str = "auto"
    accumulation: int = 1
    packing: bool = True

    def __post_init__(self) -> None:
        one_of("train", self.train, TRAIN)
        at_least("batch", self.batch, 1)
        at_least("seq", self.seq, 2)
        at_least("accumulation", self.accumulation, 1)
        at_least("lora_rank", self.lora_rank, 1)
        if self.batch % self.accumulation:
            raise ConfigError(
                f"batch {self.batch} does not divide into {self.accumulation} micro-batches."
            )
        ways = self.rows_ways
        if self.micro_batch % ways:
            raise PlanError(
                f"{self.micro_batch} rows do not divide among the {ways} groups of devices that "
                f"{self.mesh_text} makes of them, so that each device would hold all of them. "
                f"Choose a batch (of one micro-batch) that {ways} divides."
            )

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def mesh_text(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def micro_batch(self) -> int:
        """Rows that are computed at once, over all devices."""
        return self.batch // self.accumulation

    @property
    def rows_ways(self) -> int:
        """Into how many pieces the plan cuts the rows."""
        rules = dict(plan_named(self.plan).activations)
        return math.prod(self.mesh.get(axis, 1) for axis in rules.get("batch", ()))

    @functools.cached_property
    def module(self) -> Any:
        """The abstract model, equal layers folded.

        Raises:
            ConfigError: no such family, or a model that does not go on with a text.
            PlanError: rows are longer than it has positions for.
        """
        found = _module(json.dumps(self.config, sort_keys=True))
        most = found.longest()
        if most is not None and self.seq > most:
            raise PlanError(
                f"A row has {self.seq} tokens, but this model has positions for {most}; say --seq "
                f"of at most {most}."
            )
        return found

    @property
    def stored(self) -> Any:
        """The dtype of the weights in the checkpoint."""
        named = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        return jnp.dtype(named)

    @property
    def computing(self) -> Any:
        """The dtype of activations."""
        return jnp.dtype(self.dtype) if self.dtype else self.stored

    def settings(self) -> TrainConfig:
        """The same as the trainer takes it."""
        return TrainConfig(
            output="",
            batch_size=self.micro_batch,
            accumulation=self.accumulation,
            seq_len=self.seq,
            packing=self.packing,
            optimizer=self.optimizer,
            lora_rank=self.lora_rank if self.train == "lora" else None,
            dtype=self.dtype,
            remat=self.remat or False,
        )

    def runtime(self, mesh: Any) -> Runtime:
        """How it is run, on a mesh of devices or of sizes alone."""
        return Runtime(
            placement=Placement(mesh, plan_named(self.plan)),
            attention=AttentionSettings(self.attention),
            checkpointing=checkpointing_of(self.remat if self.train != "none" else None),
        )

    def paper(self) -> Any:
        """The mesh as sizes."""
        return AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))


@functools.lru_cache(maxsize=8)
def _module(config_json: str) -> Any:
    module = abstract_module(hf_config(json.loads(config_json)))[0]
    only_generating(module, "be planned")
    return folded(module, stack_params)


def shapes(job: Job, placement: Placement) -> Any:
    """The model as `jax.ShapeDtypeStruct`s at their places, with adapters if they are trained."""
    kind = job.computing if job.train == "none" else job.stored
    tree = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, kind, sharding=placement.weight(p)),
        job.module,
        is_leaf=is_param,
    )
    return _with_adapters(tree, job.lora_rank) if job.train == "lora" else tree


def _adapter_shapes(layer: Any, rank: int, stacked: bool) -> tuple[tuple[int, ...], ...]:
    """Of `a` and `b` on a projection."""
    shape = layer.weight.shape
    split = len(shape) - layer.contract
    return (*shape[: int(stacked)], rank, *shape[split:]), (*shape[:split], rank)


def _with_adapters(tree: Any, rank: int) -> Any:
    """`tune.add_lora` for shapes."""
    chosen, stacked = matching(tree, None), in_body(tree)

    def adapt(path: str, layer: Any) -> Any:
        if path not in chosen:
            return layer
        weight = layer.weight
        a, b = (
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in _adapter_shapes(layer, rank, stacked(path))
        )
        leaf = LowRank(weight=weight, a=a, b=b, scale=scale_of(rank, 16.0))
        places = leaf.shardings(weight.sharding)
        leaf = dataclasses.replace(
            leaf, a=a.update(sharding=places.a), b=b.update(sharding=places.b)
        )
        return dataclasses.replace(layer, weight=leaf)

    return map_linears(adapt, tree)


def turns(module: Any) -> int:
    """How often the folded body runs; 1 where nothing is folded."""
    return module.layers.count if isinstance(module.layers, Folded) else 1
