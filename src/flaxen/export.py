"""Write a Model as the folder that Transformers loads."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.convert.arrays import ArrayTensor, Held, OwnPart
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import Relation, relate
from flaxen.convert.report import Report
from flaxen.convert.save import write_checkpoint
from flaxen.convert.transforms import reverted
from flaxen.core.errors import CheckpointError, InputError
from flaxen.core.progress import Progress, reporting
from flaxen.core.tree import is_param, paths
from flaxen.families.config import abstract_module, both_spellings
from flaxen.fit import hub_layout
from flaxen.layers.runtime import FILE
from flaxen.model import Model
from flaxen.models.fold import unfold
from flaxen.quantize import QuantizedWeight, quantize_fp8, stored_tensors
from flaxen.target import kind_of, write_file


def save(
    model: Model,
    folder: str | Path,
    *,
    dtype: Any = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    runtime: bool = False,
    progress: Progress = True,
) -> None:
    """Write a folder that Transformers loads: weights under the hub's names, config, generation
    config, tokenizer files. A name ending in .gguf makes a file for llama.cpp instead.

    Nothing is gathered whole; the folder is the old one or the new one at every moment. `tokenizer`
    (an HF tokenizer) is saved too, otherwise the files of the folder that the model came from are
    copied. Where several processes share the model, all call this, and each writes its own part.

    `quantize` is "fp8" for a folder and "q8_0" for a file; a file is F16 if nothing is asked.
    `runtime` writes how the model is run beside it, for `load(..., runtime=folder)`.
    Weights that stayed packed are written as the checkpoint had them, and its
    `quantization_config` with them.

    Raises:
        InputError: a target that cannot hold what is asked.
        CheckpointError: for a model with adapters that are not merged, or an abstract one, or a
            dtype asked of packed weights.
    """
    kind, where = float_dtype(dtype), kind_of(folder, quantize, dtype)
    several = jax.process_count() > 1
    if runtime and where == "gguf":
        raise InputError("A file for llama.cpp has no place for runtime=True; save a folder.")
    text = model.runtime.to_json() + "\n" if runtime else None

    def beside(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if text is not None:
            (folder / FILE).write_text(text, encoding="utf-8")

    raw = both_spellings(json.loads(model.origin.config_json))
    raw.setdefault("architectures", [f"{model.config.model_type.title()}ForCausalLM"])
    tensors, quantization = _stored(model, OwnPart if several else ArrayTensor)
    if quantization is not None:
        raw["quantization_config"] = quantization
        if kind is not None:
            raise CheckpointError(
                "The model holds packed weights, which are saved as they are stored; leave dtype "
                "out, or load the model with quantized='dequantize'."
            )
    if quantize == "fp8":
        tensors, raw = quantize_fp8(tensors, raw)
    with reporting(progress, "Saving", sum(t.nbytes for t in tensors.values())) as report:
        if where == "gguf":
            stored_as = quantize or (kind and kind.name)
            _write_file(model, raw, tensors, folder, stored_as, tokenizer, report)
            return
        write_checkpoint(
            tensors,
            folder,
            held=hub_tensors(model, Held) if several else None,
            config=raw,
            generation_config=model.generation_config,
            copy_from=model.origin.folder,
            max_shard_size=max_shard_size,
            dtype=kind,
            write_beside=beside if tokenizer is not None or runtime else None,
            progress=report,
        )


def _write_file(
    model: Model,
    config: dict[str, Any],
    tensors: Mapping[str, LazyTensor],
    path: str | Path,
    stored_as: str | None,
    tokenizer: Any,
    progress: Callable[[int], None] | None,
) -> None:
    with tempfile.TemporaryDirectory() as made:
        beside = model.origin.folder
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
            beside = Path(made)
        write_file(
            tensors, config, path, stored_as=stored_as, tokenizer_folder=beside, progress=progress
        )


def hub_tensors(
    model: Model, leaf: Callable[[Any], LazyTensor] = ArrayTensor
) -> dict[str, LazyTensor]:
    """What `leaf` makes of a model's weights, under the names and layouts they were loaded from;
    of packed weights, part by part.
    """
    return _stored(model, leaf)[0]


def _stored(
    model: Model, leaf: Callable[[Any], LazyTensor]
) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """What a file of this model holds, and the `quantization_config` if weights are packed."""
    abstract, family, _ = abstract_module(model.config)
    relation, lazies = relate(abstract, family.names), _leaves(model, leaf)
    extra = sorted(set(lazies) - set(paths(abstract, is_param)))
    if extra:
        raise CheckpointError(
            "The model holds weights that its checkpoint has no place for: "
            f"{', '.join(extra[:4])}. Merge adapters first (flaxen.tune.merge)."
        )
    packs = {path: x for path, x in lazies.items() if isinstance(x, QuantizedWeight)}
    rows = (row for row in relation.rows if not packs.keys() & (p for p, _ in row.parts.values()))
    out = hub_layout(Relation(tuple(rows)), lazies, model.loading or Report())
    applied = model.origin.applied
    if applied is not None:
        out = reverted(out, applied)
    if not packs:
        return out, None
    renamed = applied.names if applied else {}
    names = {row.path: renamed.get(row.names[0], row.names[0]) for row in relation.table()}
    named = {names[path]: x for path, x in packs.items()}
    stored, quantization = stored_tensors(named, model.origin.quantization_json or "")
    return out | stored, quantization


def _leaves(model: Model, leaf: Callable[[Any], LazyTensor]) -> dict[str, Any]:
    """What `leaf` makes of each weight, by path; packed weights with their parts made so."""
    for path, weight in model.parameters().items():
        if not isinstance(weight, jax.Array | np.ndarray):
            raise CheckpointError(
                f"{path} holds no weight but a {type(weight).__name__}; load the model without "
                "abstract=True."
            )
    tensors = jax.tree.map(leaf, model.module)
    apart = dataclasses.replace(tensors, layers=unfold(tensors.layers, _layer))
    return paths(apart, lambda x: isinstance(x, LazyTensor | QuantizedWeight))


def _layer(tensor: LazyTensor, i: int) -> LazyTensor:
    box = (slice(i, i + 1), *(slice(0, n) for n in tensor.shape[1:]))
    return tensor.crop(box).reshape(tensor.shape[1:])
