"""Write a Model as the folder that Transformers loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import Relation, relate
from flaxen.convert.report import Report
from flaxen.convert.save import write_checkpoint
from flaxen.convert.transforms import reverted
from flaxen.core.errors import CheckpointError
from flaxen.core.progress import Progress, reporting
from flaxen.core.tree import is_param, paths
from flaxen.families.config import abstract_module, both_spellings
from flaxen.fit import hub_layout
from flaxen.model import Model
from flaxen.models.fold import unfold
from flaxen.quantize import QuantizedWeight, stored_tensors


def save(
    model: Model,
    folder: str | Path,
    *,
    dtype: Any = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    progress: Progress = True,
) -> None:
    """Write a folder that Transformers loads: weights under the hub's names, config, generation
    config, tokenizer files.

    Nothing is gathered whole; the folder is the old one or the new one at every moment. `tokenizer`
    (an HF tokenizer) is saved too, otherwise the
    files of the folder that the model came from are copied.

    Weights that stayed packed are written as the checkpoint had them, and its
    `quantization_config` with them.

    Raises:
        CheckpointError: for a model with adapters that are not merged, or an abstract one, or a
            dtype asked of packed weights.
    """
    kind = float_dtype(dtype)
    raw = both_spellings(json.loads(model.origin.config_json))
    raw.setdefault("architectures", [f"{model.config.model_type.title()}ForCausalLM"])
    tensors, quantization = _stored(model)
    if quantization is not None:
        raw["quantization_config"] = quantization
        if kind is not None:
            raise CheckpointError(
                "The model holds packed weights, which are saved as they are stored; leave dtype "
                "out, or load the model with quantized='dequantize'."
            )
    with reporting(progress, "Saving", sum(t.nbytes for t in tensors.values())) as report:
        write_checkpoint(
            tensors,
            folder,
            config=raw,
            generation_config=model.generation_config,
            copy_from=model.origin.folder,
            max_shard_size=max_shard_size,
            dtype=kind,
            progress=report,
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def hub_tensors(model: Model) -> dict[str, LazyTensor]:
    """A model's weights as lazy tensors under the names and layouts they were loaded from; packed
    ones by part.
    """
    return _stored(model)[0]


def _stored(model: Model) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """What a file of this model holds, and the `quantization_config` if weights are packed."""
    for path, leaf in model.parameters().items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise CheckpointError(
                f"{path} holds no weight but a {type(leaf).__name__}; load the model without "
                "abstract=True."
            )
    abstract, family, _ = abstract_module(model.config)
    relation = relate(abstract, family.names)
    tensors = jax.tree.map(ArrayTensor, model.module)
    layers = unfold(tensors.layers, _layer)
    lazies = paths(
        dataclasses.replace(tensors, layers=layers),
        lambda x: isinstance(x, LazyTensor | QuantizedWeight),
    )
    extra = sorted(set(lazies) - set(paths(abstract, is_param)))
    if extra:
        raise CheckpointError(
            "The model holds weights that its checkpoint has no place for: "
            f"{', '.join(extra[:4])}. Merge adapters first (flaxen.tune.merge)."
        )
    leaves = {path: x for path, x in lazies.items() if isinstance(x, QuantizedWeight)}
    rows = (row for row in relation.rows if not any(p in leaves for p, _ in row.parts.values()))
    out = hub_layout(Relation(tuple(rows)), lazies, model.loading or Report())
    applied = model.origin.applied
    if applied is not None:
        out = reverted(out, applied)
    if not leaves:
        return out, None
    renamed = applied.names if applied else {}
    names = {row.path: renamed.get(row.names[0], row.names[0]) for row in relation.table()}
    packs = {names[path]: leaf for path, leaf in leaves.items()}
    stored, quantization = stored_tensors(packs, model.origin.quantization_json or "")
    return out | stored, quantization


def _layer(tensor: LazyTensor, i: int) -> LazyTensor:
    box = (slice(i, i + 1), *(slice(0, n) for n in tensor.shape[1:]))
    return tensor.crop(box).reshape(tensor.shape[1:])
