"""The front door: open a checkpoint as a Model."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.adapter import adapted, base_of
from flaxen.attention import AttentionSettings
from flaxen.cache import CacheSettings
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.dtypes import DtypePlan, dtype_plan
from flaxen.convert.formats.checkpoint import Checkpoint, open_checkpoint
from flaxen.convert.lazy import LazyTensor, stack
from flaxen.convert.load import load_row
from flaxen.convert.place import place
from flaxen.convert.report import Report
from flaxen.convert.transforms import Applied
from flaxen.core.progress import Progress, reporting
from flaxen.core.tree import Param, is_param, paths, rebuild
from flaxen.families.tasks import asked
from flaxen.fit import Fit, fit
from flaxen.fresh import from_config, initial
from flaxen.layers.checkpointing import Checkpointing
from flaxen.layers.runtime import Runtime
from flaxen.model import Model, Origin
from flaxen.models.fold import folded, in_body, stack_params
from flaxen.quantize import Rules, keeps, packed, rounded_leaves, stored_settings
from flaxen.running import runtime_of
from flaxen.shard import Placement, Plan

__all__ = ["from_config", "load"]


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: AttentionSettings | str | None = None,
    cache: CacheSettings | str | None = None,
    config: Mapping[str, Any] | None = None,
    task: str | None = None,
    num_labels: int | Sequence[str] = 2,
    key_mapping: Mapping[str, str] | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    remote: bool = False,
    strict: bool = True,
    ignore_mismatched_sizes: bool = False,
    abstract: bool = False,
    scan_layers: bool | None = None,
    remat: bool | str | Checkpointing = False,
    quantized: str = "dequantize",
    bits: Rules | None = None,
    runtime: Runtime | str | Path | None = None,
    progress: Progress = True,
) -> Model:
    """Open a Hugging Face folder, a hub id or a file of weights as a Model.

    Each device reads the bytes of its own shards once, and only those.

    dtype: what floats become (default: as stored): one for all, or by name: {"norm": "float32",
    "*": "bfloat16"}, the first that is found in a tensor's name counts.
    mesh, plan: for example "fsdp=2,tp=4", and which axes it cuts (default "auto").
    cache: how keys and values are kept while generating: CacheSettings, or a codec ("int8").
    config: what stands in for keys of config.json, such as another head for an encoder:
    {"architectures": ["BertForSequenceClassification"], "num_labels": 3}, with strict=False.
    task: "sequence-classification" for a head that scores `num_labels` (how many, or their names)
    for a row, fresh where the checkpoint has none; a head of another task is left out.
    key_mapping: {regex: replacement} for keys of the checkpoint; saving renames them back.
    adapter: a PEFT folder. A `path` that is one is loaded on top of the model that it names.
    revision, token, remote: of a hub id: a branch, tag or commit; whose account; whether to read
    weights where they are, without downloading files.
    strict: False initialises missing weights and reports the rest in `.loading`;
    ignore_mismatched_sizes does so for tensors of another shape.
    abstract: read no weight.
    scan_layers: stack equal layers into one compiled body (default: off on CPU, where it costs
    speed, on elsewhere). remat: compute activations again in the backward pass; True, or what to
    remember: a policy of `flaxen.layers.checkpointing`, or a `Checkpointing`.
    quantized: "keep" leaves quantised matrices packed in memory, and saving gives them back as they
    were; "dequantize" makes plain weights of them.
    bits: round projections to 8 or 4 bits while they are read: for all, or by path, {"mlp": 4,
    "self_attn": 8}. See `Model.quantize`.
    runtime: how to run it, or a folder that such was saved in; other options go before it.
    progress: True for a bar on a terminal, False, or a function told bytes as they arrive.

    Raises:
        ConfigError, CheckpointError, PlanError: with all problems found, before anything is placed.
    """
    start, keep = time.perf_counter(), keeps(quantized)
    how = runtime_of(
        runtime,
        mesh=mesh,
        plan=plan,
        attention=attention,
        cache=cache,
        scan_layers=scan_layers,
        remat=remat,
    )
    rules = how.weights.bits if bits is None else bits
    how = how if bits is None else how.with_bits(bits)
    # What is in few bits already, as a runtime asks, is not rounded a second time.
    keep = keep or (bits is None and rules is not None)
    dtypes, placement = dtype_plan(how.stored if dtype is None else dtype), how.placement
    if adapter is None and (base := base_of(path)) is not None:
        path, adapter = base, path
    checkpoint = open_checkpoint(path, revision=revision, token=token, remote=remote)
    heads = {} if task is None else asked(checkpoint.config, task, num_labels)
    checkpoint.config = {**checkpoint.config, **heads, **(config or {})}
    found = fit(checkpoint, key_mapping)
    report = dataclasses.replace(
        found.report, replicated=placement.all_uncut(found.module) if placement else []
    )
    needed = report if task is None else dataclasses.replace(report, missing=_but_heads(found))
    needed.raise_if_bad(strict, ignore_mismatched_sizes)
    dtypes.check(found.names.values())
    if not abstract:
        found = _completed(found)
    module = _described(found, dtypes)
    if abstract:
        module = folded(module, stack_params) if how.folds else module
    else:
        module = _read(module, found.weights, placement, how.folds, keep, rules, progress)
        report = dataclasses.replace(
            report, bytes_read=checkpoint.bytes_read, seconds=time.perf_counter() - start
        )
    origin = _origin(checkpoint, dtypes.main, how, report, found.applied)
    if keep:
        origin = dataclasses.replace(origin, quantization_json=stored_settings(checkpoint))
    model = Model(module=module, origin=origin)
    return model if adapter is None else adapted(model, adapter)


def _but_heads(found: Fit) -> list[str]:
    """What the checkpoint lacks besides the head that a task begins with."""
    starts = tuple(f"{head}." for head in found.module.heads())
    fresh = {name for path, name in found.names.items() if path.startswith(starts)}
    return [name for name in found.report.missing if name not in fresh]


def _completed(found: Fit) -> Fit:
    """With weights of which a part is fresh, as that is missing."""
    weights = dict(found.weights)
    for row, fits in found.partial:
        kind = np.result_type(*{tensor.dtype for tensor in fits.values()})
        parts = {path: dataclasses.replace(x, dtype=kind) for path, x in row.parts.values()}
        fresh = {path: ArrayTensor(initial(path, param)) for path, param in parts.items()}
        weights |= load_row(row, row.save(fresh) | fits)
    return dataclasses.replace(found, weights=weights)


def _described(found: Fit, dtypes: DtypePlan) -> Any:
    """The abstract model with the dtypes that its weights will have."""

    def describe(path: str, param: Param) -> Param:
        tensor = found.weights.get(path)
        stored = np.dtype(np.float32) if tensor is None else tensor.dtype
        return dataclasses.replace(param, dtype=dtypes.of(found.names[path], stored))

    return rebuild(
        found.module, {p: describe(p, x) for p, x in paths(found.module, is_param).items()}
    )


def _read(
    module: Any,
    weights: Mapping[str, LazyTensor],
    placement: Placement | None,
    scan: bool,
    keep: bool,
    bits: Rules | None,
    progress: Progress,
) -> Any:
    """The module with arrays in place of its descriptions: read, or fresh where nothing is, or
    packed weights where there are such to `keep`, or rounded ones as `bits` says.
    """

    def tensor(path: str, param: Param) -> LazyTensor:
        if path not in weights:
            return ArrayTensor(initial(path, param))
        return weights[path].astype(np.dtype(param.dtype))

    tensors = {path: tensor(path, param) for path, param in paths(module, is_param).items()}
    if scan:
        tensors = paths(folded(rebuild(module, tensors), stack))
        module = folded(module, stack_params)
    params = paths(module, is_param)
    where: dict[str, Any] = {
        path: placement.weight(x) if placement else None for path, x in params.items()
    }
    # Parts of packed weights are lazy tensors too, each with its own place.
    leaves: dict[str, Any] = {path: tensors[path] for path in params}
    if keep:
        packs, places = packed(leaves, where, in_body(module))
        leaves, where = leaves | packs, where | places
    if bits is not None:
        plain = {path: x for path, x in leaves.items() if isinstance(x, LazyTensor)}
        rounds, places = rounded_leaves(module, plain, where, bits)
        leaves, where = leaves | rounds, where | places
    total = sum(t.nbytes for t in jax.tree.leaves(leaves))
    with reporting(progress, "Loading", total) as report:
        return rebuild(module, place(leaves, where, progress=report))


def _origin(
    checkpoint: Checkpoint,
    kind: np.dtype | None,
    runtime: Runtime,
    report: Report,
    applied: Applied,
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
        applied=applied,
    )
