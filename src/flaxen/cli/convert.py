"""`flaxen convert`: any checkpoint to a Hugging Face folder or a GGUF file, never loaded whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.options import Json, Source, about
from flaxen.cli.output import print_json, print_out
from flaxen.core.errors import InputError
from flaxen.core.progress import reporting

if TYPE_CHECKING:
    from flaxen.convert.formats.checkpoint import Checkpoint
    from flaxen.convert.lazy import LazyTensor
    from flaxen.fit import Fit

QUANTIZE = {"fp8": "folder", "q8_0": "gguf"}
"""What `--quantize` offers, and the kind of target that can hold it."""

GGUF_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""How GGUF calls what matrices are stored as; F16 if nothing is asked."""


def convert(
    source: Source,
    target: Annotated[str, about("The folder or .gguf file to write.")],
    *,
    dtype: Annotated[
        str | None, about("float32, bfloat16, ...; default: as stored, or F16.")
    ] = None,
    quantize: Annotated[str | None, about("fp8 (folders) or q8_0 (.gguf).")] = None,
    revision: Annotated[str | None, about("Branch, tag or commit of a hub id.")] = None,
    max_shard_size: Annotated[str, about("Files no larger than this, if tensors allow.")] = "5GB",
    dry_run: Annotated[
        bool, about("Print which tensor becomes which weight, write nothing.")
    ] = False,
    overwrite: Annotated[bool, about("Replace a model that is there.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder or, to a name ending in .gguf, as a GGUF file.

    Tensors are read, converted and written chunk by chunk, so a model far larger than the memory
    can be converted.
    """
    from flaxen.convert.dtypes import float_dtype
    from flaxen.convert.formats.checkpoint import open_checkpoint
    from flaxen.fit import fit

    kind = "gguf" if target.endswith(".gguf") else "folder"
    if quantize is not None and QUANTIZE.get(quantize) != kind:
        offered = ", ".join(name for name, where in QUANTIZE.items() if where == kind)
        raise InputError(f"--quantize {quantize} is not for a {kind}; for it there is {offered}.")
    if quantize is not None and dtype is not None:
        raise InputError("--quantize and --dtype both say how weights are stored; leave one out.")
    wanted = float_dtype(dtype)
    if not dry_run:
        _refuse_to_replace(Path(target), overwrite)
    checkpoint = open_checkpoint(source, revision=revision)
    found = fit(checkpoint)
    if dry_run:
        _relation(found, json)
    found.report.raise_if_bad()
    if dry_run:
        return None
    tensors, config = found.tensors(), checkpoint.config
    if quantize == "fp8":
        from flaxen.quantize import quantize_fp8

        tensors, config = quantize_fp8(tensors, config)
    with reporting(True, "Writing", sum(t.nbytes for t in tensors.values())) as progress:
        if kind == "gguf":
            _write_gguf(tensors, checkpoint, target, quantize or dtype, progress)
        else:
            _write_folder(tensors, checkpoint, config, target, wanted, max_shard_size, progress)
    if kind == "folder" and checkpoint.format == "gguf":
        import flaxen

        # A folder's tokenizer files are copied; a GGUF file has its tokenizer inside.
        flaxen.tokenizer(checkpoint.files[0]).save_pretrained(target)
    return _summary(tensors, target, json)


def _refuse_to_replace(target: Path, overwrite: bool) -> None:
    if not overwrite and (target.is_file() or (target / "config.json").exists()):
        raise InputError(f"{str(target)!r} holds a model; add --overwrite to replace it.")


def _write_gguf(
    tensors: Mapping[str, LazyTensor],
    checkpoint: Checkpoint,
    target: str,
    stored_as: str | None,
    progress: Any,
) -> None:
    from flaxen.convert.formats.gguf_write import write_gguf
    from flaxen.families.config import hf_config

    write_gguf(
        tensors,
        hf_config(checkpoint.config).to_dict(),
        target,
        kind=GGUF_KINDS.get(stored_as or "float16", "F16"),
        tokenizer_folder=checkpoint.folder,
        metadata=checkpoint.metadata if checkpoint.format == "gguf" else None,
        progress=progress,
    )


def _write_folder(
    tensors: Mapping[str, LazyTensor],
    checkpoint: Checkpoint,
    config: dict[str, Any],
    target: str,
    dtype: Any,
    max_shard_size: str,
    progress: Any,
) -> None:
    from flaxen.convert.save import write_checkpoint
    from flaxen.families.config import both_spellings

    write_checkpoint(
        tensors,
        target,
        config=both_spellings(config),
        generation_config=checkpoint.generation_config,
        copy_from=checkpoint.folder,
        max_shard_size=max_shard_size,
        dtype=dtype,
        progress=progress,
    )


def _relation(found: Fit, json: bool) -> None:
    from flaxen.show import human_bytes, table

    rows = [row for row in found.relation.table() if row.path in found.weights]
    if json:
        sizes = {path: tensor.nbytes for path, tensor in found.weights.items()}
        return print_json(
            {"weights": [{**row._asdict(), "bytes": sizes[row.path]} for row in rows]}
        )
    printed = (
        (row.path, _together(row.names), row.layout, human_bytes(found.weights[row.path].nbytes))
        for row in rows
    )
    return print_out(table(["weight", "tensors", "layout", "bytes"], printed))


def _together(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _summary(tensors: Mapping[str, LazyTensor], target: str, json: bool) -> None:
    from flaxen.show import human_bytes, table

    here = Path(target)
    written = sorted(here.iterdir()) if here.is_dir() else [here]
    files = {file.name: file.stat().st_size for file in written}
    if json:
        parameters = sum(t.size for t in tensors.values())
        return print_json({"target": target, "files": files, "parameters": parameters})
    rows = ((name, human_bytes(size)) for name, size in files.items())
    return print_out(table(["file", "size"], rows, title=target))
