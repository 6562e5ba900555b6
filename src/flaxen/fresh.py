"""Models with fresh weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import AttentionSettings, known
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.report import Report
from flaxen.core.platform import platform
from flaxen.core.tree import Param, is_param, paths, rebuild
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.checkpointing import Checkpointing, checkpointing_of
from flaxen.layers.runtime import Runtime
from flaxen.model import Model, Origin
from flaxen.models.fold import folded
from flaxen.shard import Plan, placement_on


def from_config(
    config: Mapping[str, Any] | Any,
    *,
    seed: int = 0,
    dtype: Any = "float32",
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: str = "auto",
    scan_layers: bool | None = None,
    remat: bool | str | Checkpointing = False,
) -> Model:
    """A Model with fresh weights: the same for a seed on every mesh.

    Raises:
        ConfigError, PlanError: as `load` does.
    """
    raw = dict(config) if isinstance(config, Mapping) else config.to_dict()
    kind, placement, parsed = float_dtype(dtype), placement_on(mesh, plan), hf_config(raw)
    module, _, reading = abstract_module(parsed)
    scale = float(getattr(parsed, "initializer_range", None) or 0.02)
    fresh = {}
    for path, param in paths(module, is_param).items():
        described = dataclasses.replace(param, dtype=kind or np.dtype(np.float32))
        where = placement.weight(param) if placement else None
        fresh[path] = initial(path, described, where, seed, scale)
    module = rebuild(module, fresh)
    if platform() != "cpu" if scan_layers is None else scan_layers:
        module = folded(module, jnp.stack)
    raw["dtype"] = (kind or np.dtype(np.float32)).name
    origin = Origin(
        config_json=json.dumps(raw, sort_keys=True, default=str),
        runtime=Runtime(
            attention=known(AttentionSettings(attention)),
            checkpointing=checkpointing_of(remat),
            placement=placement,
        ),
        loading=Report(unread=list(reading.unread())),
    )
    return Model(module=module, origin=origin)


def initial(
    path: str, param: Param, sharding: Any = None, seed: int = 0, scale: float = 0.02
) -> jax.Array:
    """A fresh weight: a function of seed and path alone, whatever the mesh."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    return _fresh(param.shape, param.dtype or np.dtype(np.float32), param.init, sharding)(
        key, scale
    )


@functools.cache
def _fresh(shape: tuple[int, ...], dtype: np.dtype, init: str, sharding: Any) -> Any:
    """One program for all weights of a kind."""

    def make(key: jax.Array, scale: jax.Array) -> jax.Array:
        if init != "normal":
            return jnp.full(shape, float(init == "ones"), dtype)
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
