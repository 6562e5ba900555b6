"""Write a Model as the folder that Transformers loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.convert.arrays import ArrayTensor, Held, OwnPart
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import relate
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
    (an HF tokenizer) is saved too, otherwise the files of the folder that the model came from are
    copied. Where several processes share the model, all call this, and each writes its own part.

    Raises:
        CheckpointError: for a model with adapters that are not merged, or an abstract one.
    """
    kind = float_dtype(dtype)
    raw = both_spellings(json.loads(model.origin.config_json))
    raw.setdefault("architectures", [f"{model.config.model_type.title()}ForCausalLM"])
    several = jax.process_count() > 1
    tensors = hub_tensors(model, OwnPart if several else ArrayTensor)
    with reporting(progress, "Saving", sum(t.nbytes for t in tensors.values())) as report:
        write_checkpoint(
            tensors,
            folder,
            held=hub_tensors(model, Held) if several else None,
            config=raw,
            generation_config=model.generation_config,
            copy_from=model.origin.folder,
            max_shard_size=max_shard_size,
            dtype=kind,
            write_beside=None if tokenizer is None else tokenizer.save_pretrained,
            progress=report,
        )


def hub_tensors(
    model: Model, leaf: Callable[[Any], LazyTensor] = ArrayTensor
) -> dict[str, LazyTensor]:
    """What `leaf` makes of a model's weights, under the names and layouts they were loaded from."""
    for path, weight in model.parameters().items():
        if not isinstance(weight, jax.Array | np.ndarray):
            raise CheckpointError(
                f"{path} holds no weight but a {type(weight).__name__}; load the model without "
                "abstract=True."
            )
    abstract, family, _ = abstract_module(model.config)
    relation = relate(abstract, family.names)
    tensors = jax.tree.map(leaf, model.module)
    layers = unfold(tensors.layers, _layer)
    lazies = paths(dataclasses.replace(tensors, layers=layers), lambda x: isinstance(x, LazyTensor))
    extra = sorted(set(lazies) - set(paths(abstract, is_param)))
    if extra:
        raise CheckpointError(
            "The model holds weights that its checkpoint has no place for: "
            f"{', '.join(extra[:4])}. Merge adapters first (flaxen.tune.merge)."
        )
    out = hub_layout(relation, lazies, model.loading or Report())
    applied = model.origin.applied
    return out if applied is None else reverted(out, applied)


def _layer(tensor: LazyTensor, i: int) -> LazyTensor:
    box = (slice(i, i + 1), *(slice(0, n) for n in tensor.shape[1:]))
    return tensor.crop(box).reshape(tensor.shape[1:])
