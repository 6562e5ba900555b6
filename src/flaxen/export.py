"""Write a Model as the folder that Transformers loads."""

from __future__ import annotations

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
from flaxen.convert.relation import Relation, Row, relate
from flaxen.convert.report import Report
from flaxen.convert.save import write_checkpoint
from flaxen.convert.transforms import Applied, reverted
from flaxen.core.errors import CheckpointError, InputError
from flaxen.core.progress import Progress, reporting
from flaxen.core.tree import is_param, paths
from flaxen.families.config import abstract_module, described
from flaxen.families.rope_keys import both_spellings
from flaxen.families.widths import kept_wide
from flaxen.fit import hub_layout
from flaxen.layers.runtime import FILE
from flaxen.model import Model
from flaxen.models.fold import unfolded
from flaxen.models.vocab import unpadded
from flaxen.quantize import (
    QuantizedWeight,
    RoundedWeight,
    gptq_tensors,
    plain_tensor,
    quantize_fp8,
    stored_tensors,
)
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
    Rounded weights (`Model.quantize`) are written as they are with "gptq", or with a `dtype` as
    plain weights of their values. Weights that stayed packed are written as the checkpoint had
    them, and its `quantization_config` with them.

    Raises:
        InputError: a target that cannot hold what is asked.
        CheckpointError: for a model with adapters that are not merged, or an abstract one, or a
            dtype asked of packed weights, or rounded weights with neither.
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
    if model.can_generate():
        raw.setdefault("architectures", [f"{model.config.model_type.title()}ForCausalLM"])
    _check_rounded(model, quantize, kind)
    tensors, quantization = _stored(
        model, OwnPart if several else ArrayTensor, gptq=quantize == "gptq"
    )
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
            kept=_kept_wide(model, kind),
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


def _check_rounded(model: Model, quantize: str | None, kind: np.dtype | None) -> None:
    """Rounded weights are never written as if they were the original.

    Raises:
        CheckpointError: nothing says what to write, or it cannot be written.
    """
    is_rounded = lambda x: isinstance(x, RoundedWeight)
    rounded = any(map(is_rounded, jax.tree.leaves(model.module, is_leaf=is_rounded)))
    if quantize == "gptq" and not rounded:
        raise CheckpointError("No weight is rounded; model.quantize(4).save(..., quantize='gptq').")
    if rounded and quantize != "gptq" and kind is None:
        raise CheckpointError(
            "The model holds rounded weights, not those it was loaded from. quantize='gptq' writes "
            "their codes, dtype='bfloat16' plain weights of their values; to quantise otherwise, "
            "load the model without bits."
        )
    if rounded and jax.process_count() > 1:
        raise CheckpointError("Rounded weights are saved by one process; this model is on several.")


def _stored(
    model: Model, leaf: Callable[[Any], LazyTensor], gptq: bool = False
) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """What a file of this model holds, and the `quantization_config` if weights are packed."""
    abstract, family = described(model.config, model.module)
    relation, lazies = relate(abstract, family.names_of(abstract)), _leaves(model, leaf)
    extra = sorted(set(lazies) - set(paths(abstract, is_param)))
    if extra:
        raise CheckpointError(
            "The model holds weights that its checkpoint has no place for: "
            f"{', '.join(extra[:4])}. Merge adapters first (flaxen.tune.merge)."
        )
    rounds = {path: x for path, x in lazies.items() if isinstance(x, RoundedWeight)}
    if not gptq:
        lazies, rounds = lazies | {path: plain_tensor(x) for path, x in rounds.items()}, {}
    packs = {path: x for path, x in lazies.items() if isinstance(x, QuantizedWeight)}
    rows = (row for row in relation.rows if not packs.keys() & _paths(row))
    out = hub_layout(Relation(tuple(rows)), lazies, model.loading or Report())
    applied = model.origin.applied
    if applied is not None:
        out = reverted(out, applied)
    if rounds:
        stored, quantization = gptq_tensors(rounds, _layout_of(relation, rounds, applied))
        return out | stored, quantization
    if not packs:
        return out, None
    renamed = applied.names if applied else {}
    names = {row.path: renamed.get(row.names[0], row.names[0]) for row in relation.table()}
    named = {names[path]: x for path, x in packs.items()}
    stored, quantization = stored_tensors(named, model.origin.quantization_json or "")
    return out | stored, quantization


def _kept_wide(model: Model, kind: np.dtype | None) -> set[str]:
    """The names in the file of weights that stay as they are where `kind` is asked for all."""
    abstract, family, _ = abstract_module(model.config)
    rows = list(relate(abstract, family.names_of(abstract)).table())
    paths = kept_wide(abstract, family, {row.path: row.names[0] for row in rows}, kind)
    found = {name for row in rows if row.path in paths for name in row.names}
    renamed = model.origin.applied.names if model.origin.applied else {}
    return {renamed.get(name, name) for name in found}


def _paths(row: Row) -> set[str]:
    return {path for path, _ in row.parts.values()}


def _layout_of(relation: Relation, rounds: Mapping[str, Any], applied: Applied | None) -> Any:
    """How rounded weights lie in the file, where they are matrices [out, in].

    Raises:
        CheckpointError: rules that round a part of a fused tensor, or a file that has its matrices
            the other way round.
    """
    rows = [row for row in relation.rows if rounds.keys() & _paths(row)]
    for row in rows:
        if _paths(row) - rounds.keys():
            raise CheckpointError(f"{row.name} is one tensor of the file, but rounded in part.")
        for label, (path, _) in row.parts.items():
            if [*row.stacked, *row.layout.order(label)] != list(row.axes[label]):
                raise CheckpointError(
                    f"{path} lies as {row.layout.text!r} in the file; GPTQ packs outputs by inputs "
                    "alone. Give dtype= to write plain weights."
                )

    def layout(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        out = Relation(tuple(rows)).save(tensors)
        return out if applied is None else reverted(out, applied)

    return layout


def _leaves(model: Model, leaf: Callable[[Any], LazyTensor]) -> dict[str, Any]:
    """What `leaf` makes of each weight, by path; packed weights with their parts made so."""
    for path, weight in model.parameters().items():
        if not isinstance(weight, jax.Array | np.ndarray):
            raise CheckpointError(
                f"{path} holds no weight but a {type(weight).__name__}; load the model without "
                "abstract=True."
            )
    tensors = unpadded(jax.tree.map(leaf, model.module), _first_rows)
    apart = unfolded(tensors, _layer)
    return paths(apart, lambda x: isinstance(x, LazyTensor | QuantizedWeight))


def _first_rows(tensor: LazyTensor, rows: int) -> LazyTensor:
    return tensor.crop((slice(0, rows), *(slice(0, n) for n in tensor.shape[1:])))


def _layer(tensor: LazyTensor, i: int) -> LazyTensor:
    box = (slice(i, i + 1), *(slice(0, n) for n in tensor.shape[1:]))
    return tensor.crop(box).reshape(tensor.shape[1:])
