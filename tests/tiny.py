"""Models to generate with: the golden ones, and one whose next token is written down."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache import Cache
from flaxen.core.tree import is_param, module, paths
from flaxen.families import find
from flaxen.families.config import hf_config
from flaxen.families.family import Reading
from flaxen.layers.linear import Embedding
from flaxen.layers.runtime import Runtime
from flaxen.shard import Placement, make_mesh, plan_named


@dataclasses.dataclass
class Tiny:
    """What generation needs of a model."""

    module: Any
    runtime: Runtime = dataclasses.field(default_factory=Runtime)
    config: Any = dataclasses.field(default_factory=SimpleNamespace)
    generation_config: dict[str, Any] | None = None


@functools.cache
def abstract(name: str) -> Any:
    case = golden.case(name)
    family = find(case.about["model_type"])
    return family.build(Reading(hf_config(case.config)))


@functools.cache
def model(name: str = "llama", mesh: str | None = None) -> Tiny:
    """A golden case, without its EOS ids."""
    case, plan = golden.case(name), abstract(name)
    family = find(case.about["model_type"])
    weights = golden.by_path(case, plan, family.names)
    placement = None if mesh is None else Placement(make_mesh(mesh), plan_named("auto"))

    def leaf(path: str, p: Any) -> jax.Array:
        return jax.device_put(weights[path], placement and placement.weight(p))

    leaves = [leaf(path, p) for path, p in paths(plan, is_param).items()]
    module = jax.tree.unflatten(jax.tree.structure(plan, is_leaf=is_param), leaves)
    return Tiny(module, Runtime(placement=placement))


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 128, (rows, length), dtype=np.int32)


@module
class Script:
    """Stands where a decoder stands: the token at position p + 1 of row b is `table[b, p]`."""

    table: jax.Array
    embed_tokens: Embedding
    layers: tuple[Any, ...] = ()

    def context(self, positions: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return positions

    def hidden(self, ids: jax.Array, positions: jax.Array, caches: Any, **_: Any) -> Any:
        follows = jnp.take_along_axis(self.table, positions, 1, mode="clip")
        return jax.nn.one_hot(follows, self.embed_tokens.weight.shape[0]), caches, ()

    def logits(self, x: jax.Array, runtime: Runtime) -> jax.Array:
        return 5 * x

    def cache_shapes(self, batch: int, length: int, *_: Any, **__: Any) -> Cache:
        return jax.eval_shape(lambda: self.init_cache(batch, length))

    def init_cache(self, batch: int, length: int, *_: Any, **__: Any) -> Cache:
        return Cache(
            layers=(),
            index=jnp.int32(0),
            keep=jnp.zeros((batch, length), bool),
            lengths=jnp.zeros(batch, jnp.int32),
        )


def script(*rows: list[int], vocab: int = 16, **generation_config: Any) -> Tiny:
    """After a prompt of one token, row b says `rows[b]`, over and over at its end."""
    table = [[*row, *row[-1:] * (16 - len(row))] for row in rows]
    module = Script(
        table=jnp.asarray(table, jnp.int32), embed_tokens=Embedding(weight=jnp.zeros((vocab, 1)))
    )
    return Tiny(module, generation_config=generation_config)
