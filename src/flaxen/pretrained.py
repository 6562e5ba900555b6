"""The front door: open a checkpoint as a Model."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import known
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.checkpoint import Checkpoint, open_checkpoint
from flaxen.convert.lazy import LazyTensor, is_float, stack
from flaxen.convert.load import match
from flaxen.convert.place import place
from flaxen.convert.relation import Relation, relate
from flaxen.convert.report import Report
from flaxen.core.errors import CheckpointError, ConfigError, did_you_mean
from flaxen.core.platform import platform
from flaxen.core.tree import Param, is_param, paths, rebuild
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.context import Runtime
from flaxen.model import Model, Origin
from flaxen.models.fold import fold, stack_params
from flaxen.quantize import packed, part_shardings, stored_settings
from flaxen.shard import Placement, Plan, make_mesh, plan_named

DTYPES = ("float32", "bfloat16", "float16", "float64")


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: str = "auto",
    key_mapping: Mapping[str, str] | None = None,
    strict: bool = True,
    abstract: bool = False,
    scan_layers: bool | None = None,
    remat: bool = False,
    quantized: str = "dequantize",
    progress: Callable[[int], None] | None = None,
) -> Model:
    """Open a Hugging Face folder, a hub id, a .safetensors or a .gguf file as a Model.

    Each device reads the bytes of its own shards once. `dtype` converts floats (default: as
    stored); `mesh` is for example "fsdp=2,tp=4" and `plan`
    says which axes it cuts (default "auto"); `key_mapping` renames checkpoint keys first, {regex:
    replacement}; with `strict=False` missing weights
    are initialised and the rest is reported in `.loading`; `abstract` reads no weight;
    `scan_layers` stacks equal layers into one compiled body
    (default: off on CPU, where it costs speed, on elsewhere); `quantized="keep"` leaves quantised
    matrices packed in memory and gives them back as they were; `progress(bytes)` is called as
    bytes arrive.

    Raises:
        ConfigError, CheckpointError, PlanError: with all problems found, before anything is placed.
    """
    start, kind, keep = time.perf_counter(), float_dtype(dtype), _keeps(quantized)
    placement = _placement(mesh, plan)
    runtime = Runtime(attention=known(attention), remat=remat, placement=placement)
    checkpoint = open_checkpoint(path, kind)
    config = hf_config(checkpoint.config)
    module, family, reading = abstract_module(config)
    relation = relate(module, family.names)
    lazies, report = match(relation, _renamed(checkpoint, key_mapping), _tied(module, relation))
    report = dataclasses.replace(
        report,
        unread=list(reading.unread()),
        replicated=placement.all_uncut(module) if placement else [],
    )
    report.raise_if_bad(strict)
    scan = platform() != "cpu" if scan_layers is None else scan_layers
    module = _described(module, lazies, kind)
    if abstract:
        module = _folded(module, stack_params) if scan else module
    else:
        lazies = _filled(module, lazies)
        if scan:
            tensors = _folded(rebuild(module, lazies), stack)
            module = _folded(module, stack_params)
            lazies = paths(tensors)
        module = _placed(module, lazies, placement, kind, progress, keep)
        report = dataclasses.replace(
            report, bytes_read=checkpoint.bytes_read, seconds=time.perf_counter() - start
        )
    origin = _origin(checkpoint, kind, runtime, report)
    if keep:
        origin = dataclasses.replace(origin, quantization_json=stored_settings(checkpoint))
    return Model(module=module, origin=origin)


def float_dtype(dtype: Any) -> np.dtype | None:
    """The dtype that a name asks for; None (or "auto") means as stored."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}.{did_you_mean(name, DTYPES)}")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ConfigError("dtype 'float64' needs jax.config.update('jax_enable_x64', True) first.")
    return jnp.dtype(name)


def _keeps(quantized: str) -> bool:
    if quantized not in ("dequantize", "keep"):
        raise ConfigError(f"quantized is {quantized!r}; expected 'dequantize' or 'keep'.")
    return quantized == "keep"


def _placement(mesh: Any, plan: str | Plan | None) -> Placement | None:
    wanted = plan_named(plan)
    return None if mesh is None else Placement(make_mesh(mesh), wanted)


def _renamed(
    checkpoint: Checkpoint, key_mapping: Mapping[str, str] | None
) -> Mapping[str, LazyTensor]:
    """The checkpoint under the names that `key_mapping` makes; every pattern in turn."""
    if not key_mapping:
        return checkpoint
    out: dict[str, LazyTensor] = {}
    for key in checkpoint:
        name = key
        for pattern, replacement in key_mapping.items():
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise CheckpointError(
                    f"key_mapping: {pattern!r} -> {replacement!r} is no regular expression and "
                    f"replacement ({error})."
                ) from error
        if name in out:
            raise CheckpointError(
                f"key_mapping gives two tensors the name {name!r}; one is {key!r}."
            )
        out[name] = checkpoint[key]
    return out


def _tied(module: Any, relation: Relation) -> dict[str, str]:
    """Hub names of weights that share another's tensor: a head tied to the embeddings."""
    if module.lm_head is not None:
        return {}
    row = next(row for row in relation.table() if row.path == "embed_tokens.weight")
    return {"lm_head.weight": row.names[0]}


def _described(module: Any, lazies: Mapping[str, LazyTensor], kind: np.dtype | None) -> Any:
    """The abstract model with the dtypes that its weights have, or will have."""

    def describe(path: str, param: Param) -> Param:
        stored = lazies[path].dtype if path in lazies else np.dtype(np.float32)
        return dataclasses.replace(
            param, dtype=kind if kind is not None and is_float(stored) else stored
        )

    found = {path: describe(path, p) for path, p in paths(module, is_param).items()}
    return rebuild(module, found)


def _folded(module: Any, stack: Callable[[list[Any]], Any]) -> Any:
    """The module with equal layers stacked."""
    return dataclasses.replace(module, layers=fold(module.layers, stack))


def _filled(module: Any, lazies: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of every weight: fresh ones where the checkpoint has none."""
    return {
        path: lazies[path] if path in lazies else ArrayTensor(initial(path, param))
        for path, param in paths(module, is_param).items()
    }


def _placed(
    module: Any,
    lazies: Mapping[str, LazyTensor],
    placement: Placement | None,
    kind: np.dtype | None,
    progress: Callable[[int], None] | None,
    keep: bool,
) -> Any:
    """The module with arrays where its lazy tensors go, or packed weights if they are to `keep`."""
    params = paths(module, is_param)
    where = {path: placement.weight(x) if placement else None for path, x in params.items()}
    packs = {p: packed(lazies[p], placement is not None) for p in params if keep}
    kept = {p: leaf for p, leaf in packs.items() if leaf is not None}
    plain = {p: lazies[p] for p in params if p not in kept}
    arrays = place(plain, {p: where[p] for p in plain}, kind, progress)
    if kept:
        cuts = {p: part_shardings(leaf, where[p]) for p, leaf in kept.items()}
        arrays |= place(kept, cuts, None, progress)
    return rebuild(module, arrays)


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


def _origin(
    checkpoint: Checkpoint, kind: np.dtype | None, runtime: Runtime, report: Report
) -> Origin:
    raw = dict(checkpoint.config)
    if kind is not None:
        raw["dtype"] = kind.name
        raw.pop("torch_dtype", None)
    generation = checkpoint.generation_config
    return Origin(
        config_json=json.dumps(raw, sort_keys=True),
        runtime=runtime,
        folder=checkpoint.folder,
        generation_json=None if generation is None else json.dumps(generation),
        loading=report,
    )


def from_config(
    config: Mapping[str, Any] | Any,
    *,
    seed: int = 0,
    dtype: Any = "float32",
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: str = "auto",
    scan_layers: bool | None = None,
    remat: bool = False,
) -> Model:
    """A Model with fresh weights: the same for a seed on every mesh.

    Raises:
        ConfigError, PlanError: as `load` does.
    """
    raw = dict(config) if isinstance(config, Mapping) else config.to_dict()
    kind, placement, parsed = float_dtype(dtype), _placement(mesh, plan), hf_config(raw)
    module, _, reading = abstract_module(parsed)
    scale = float(getattr(parsed, "initializer_range", None) or 0.02)
    fresh = {}
    for path, param in paths(module, is_param).items():
        described = dataclasses.replace(param, dtype=kind or np.dtype(np.float32))
        where = placement.weight(param) if placement else None
        fresh[path] = initial(path, described, where, seed, scale)
    module = rebuild(module, fresh)
    if platform() != "cpu" if scan_layers is None else scan_layers:
        module = _folded(module, jnp.stack)
    raw["dtype"] = (kind or np.dtype(np.float32)).name
    origin = Origin(
        config_json=json.dumps(raw, sort_keys=True, default=str),
        runtime=Runtime(attention=known(attention), remat=remat, placement=placement),
        loading=Report(unread=list(reading.unread())),
    )
    return Model(module=module, origin=origin)
