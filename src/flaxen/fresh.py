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

from flaxen.attention import AttentionSettings
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.relation import relate
from flaxen.convert.report import Report
from flaxen.core.errors import ConfigError
from flaxen.core.tree import Param, is_param, paths, rebuild, walk
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.widths import kept_wide
from flaxen.layers.checkpointing import Checkpointing
from flaxen.layers.runtime import Runtime
from flaxen.model import Model, Origin
from flaxen.models.fold import Folded, folded, one_param, stack_params, unfolded
from flaxen.running import runtime_of
from flaxen.shard import Plan


def from_config(
    config: Mapping[str, Any] | Any,
    *,
    seed: int = 0,
    dtype: Any = None,
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: AttentionSettings | str | None = None,
    scan_layers: bool | None = None,
    remat: bool | str | Checkpointing = False,
    runtime: Runtime | None = None,
    abstract: bool = False,
) -> Model:
    """A Model with fresh weights: the same for a seed on every mesh. Options as in `load`.

    Raises:
        ConfigError, PlanError: as `load` does.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigError(
            f"config is {config!r}; expected a dict with a model_type, or a config of transformers."
        )
    raw = dict(config) if isinstance(config, Mapping) else config.to_dict()
    how = runtime_of(
        runtime,
        mesh=mesh,
        plan=plan,
        attention=attention,
        scan_layers=scan_layers,
        remat=remat,
    )
    kind = float_dtype(how.stored if dtype is None else dtype) or np.dtype(np.float32)
    module, family, reading = abstract_module(hf_config(raw))
    names = {row.path: row.names[0] for row in relate(module, family.names_of(module)).table()}
    wide = kept_wide(module, family, names, kind)
    of = lambda path: np.dtype(np.float32) if path in wide else kind
    params = paths(module, is_param).items()
    module = rebuild(module, {p: dataclasses.replace(x, dtype=of(p)) for p, x in params})
    raw["dtype"] = kind.name
    origin = Origin(
        config_json=json.dumps(raw, sort_keys=True, default=str),
        runtime=how,
        loading=Report(unread=list(reading.unread())),
    )
    model = Model(module=folded(module, stack_params) if how.folds else module, origin=origin)
    return model if abstract else filled(model, seed)


def filled(model: Model, rng: int | jax.Array, input_shape: tuple[int, int] = (1, 1)) -> Model:
    """The model with fresh weights: a function of `rng`, a seed or a key, and of each weight's name
    alone, whatever the mesh and the folding. `input_shape` is one that it must be able to run.
    """
    where, module = model.runtime.placement, model.module
    scale = float(getattr(model.config, "initializer_range", None) or 0.02)
    # Each layer by itself, so that its weights have the same names whether it is folded or not.
    flat = unfolded(module, lambda p, _: one_param(p))
    fresh = {
        path: initial(path, param, where and where.weight(param), rng, scale)
        for path, param in paths(flat, is_param).items()
    }
    made = rebuild(flat, fresh)
    if any(isinstance(part, Folded) for part in walk(module)):
        made = folded(made, jnp.stack)
    filled, bits = model.replace(module=made), model.runtime.weights.bits
    filled = filled if bits is None else filled.quantize(bits)
    given = module.example(input_shape)
    jax.eval_shape(lambda model, given: model(**given).to_tuple()[0], filled, given)
    return filled


def initial(
    path: str,
    param: Param,
    sharding: Any = None,
    seed: int | jax.Array = 0,
    scale: float = 0.02,
) -> jax.Array:
    """A fresh weight: a function of seed (or key) and path alone, whatever the mesh."""
    key = seed if isinstance(seed, jax.Array) else jax.random.key(seed)
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
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
