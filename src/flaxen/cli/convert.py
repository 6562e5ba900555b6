"""`flaxen convert`: any checkpoint to a Hugging Face folder or a GGUF file, never loaded whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.options import Json, KeyMapping, Source, about, renames
from flaxen.cli.output import print_json, print_out, remark
from flaxen.core.errors import InputError
from flaxen.core.progress import reporting

if TYPE_CHECKING:
    from flaxen.convert.formats.checkpoint import Checkpoint
    from flaxen.convert.lazy import LazyTensor
    from flaxen.convert.relation import TableRow
    from flaxen.fit import Fit


def convert(
    source: Source,
    target: Annotated[str, about("The folder or .gguf file to write.")],
    *,
    dtype: Annotated[
        str | None, about("float32, bfloat16, ...; default: as stored, in .gguf float16.")
    ] = None,
    quantize: Annotated[str | None, about("fp8 (folders) or q8_0 (.gguf).")] = None,
    key_mapping: KeyMapping = None,
    adapter: Annotated[str | None, about("A PEFT folder or hub id to merge into it.")] = None,
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
    can be converted. An adapter is worked into the tensors as they are read; a source that is one
    is merged into the model that it names.
    """
    from flaxen.adapter import folder_of, source_of
    from flaxen.convert.dtypes import float_dtype
    from flaxen.convert.formats.checkpoint import open_checkpoint
    from flaxen.fit import fit
    from flaxen.target import kind_of
    from flaxen.tune.lazy import merged_tensors

    if quantize == "gptq":
        raise InputError("A model is rounded by `flaxen quantize MODEL FOLDER --bits 4`.")
    kind = kind_of(target, quantize, dtype)
    wanted = float_dtype(dtype)
    if not dry_run:
        refuse_to_replace(Path(target), overwrite)
    base, top, revision = source_of(source, adapter, revision=revision)
    checkpoint = open_checkpoint(base, revision=revision)
    found = fit(checkpoint, renames(key_mapping))
    if dry_run:
        _relation(found, json)
    found.report.raise_if_bad()
    if dry_run:
        return None
    tensors, config = found.tensors(), checkpoint.config
    if isinstance(top, str | Path):
        tensors = merged_tensors(tensors, found.module, found.relation, folder_of(top))
    if quantize == "fp8":
        from flaxen.quantize import quantize_fp8

        tensors, config = quantize_fp8(tensors, config)
        stay = config["quantization_config"]["modules_to_not_convert"]
        scales = sum(name.endswith("_scale_inv") for name in tensors)
        remark(f"{scales} matrices in float8, {len(stay)} stay as they are")
    with reporting(True, "Writing", sum(t.nbytes for t in tensors.values())) as progress:
        if kind == "gguf":
            stored_as = quantize or (wanted and wanted.name)
            _write_gguf(tensors, checkpoint, target, stored_as, progress)
        else:
            asked = wanted, found.kept_wide(wanted)
            _write_folder(tensors, checkpoint, config, target, asked, max_shard_size, progress)
    return _summary(tensors, target, json)


def refuse_to_replace(target: Path, overwrite: bool) -> None:
    """
    Raises:
        InputError: a model is there.
    """
    if not overwrite and (target.is_file() or (target / "config.json").exists()):
        raise InputError(f"{str(target)!r} holds a model; add --overwrite to replace it.")


def _write_gguf(
    tensors: Mapping[str, LazyTensor],
    checkpoint: Checkpoint,
    target: str,
    stored_as: str | None,
    progress: Any,
) -> None:
    from flaxen.target import has_tokenizer, write_file

    inside = checkpoint.format == "gguf"
    if not inside and not has_tokenizer(checkpoint.folder):
        remark("there is no tokenizer beside the weights, so the file has none")
    write_file(
        tensors,
        checkpoint.config,
        target,
        stored_as=stored_as,
        tokenizer_folder=checkpoint.folder,
        metadata=checkpoint.metadata if inside else None,
        progress=progress,
    )


def _write_folder(
    tensors: Mapping[str, LazyTensor],
    checkpoint: Checkpoint,
    config: dict[str, Any],
    target: str,
    asked: tuple[Any, set[str]],
    max_shard_size: str,
    progress: Any,
) -> None:
    from flaxen.convert.save import write_checkpoint
    from flaxen.families.rope_keys import both_spellings

    beside = None
    if checkpoint.format == "gguf":
        import flaxen

        # A folder's tokenizer files are copied; a GGUF file has its tokenizer inside.
        beside = flaxen.tokenizer(checkpoint.files[0]).save_pretrained
    write_checkpoint(
        tensors,
        target,
        config=both_spellings(config),
        generation_config=checkpoint.generation_config,
        copy_from=checkpoint.folder,
        write_beside=beside,
        max_shard_size=max_shard_size,
        dtype=asked[0],
        kept=asked[1],
        progress=progress,
    )


def _relation(found: Fit, json: bool) -> None:
    """Each weight: the keys of the checkpoint that it is made of, how they lie there, its bytes."""
    from flaxen.convert.report import fold
    from flaxen.show import human_bytes, table

    rows = [row for row in found.relation.table() if row.path in found.weights]
    made_of = {
        row.path: tuple(dict.fromkeys(k for name in row.names for k in found.sources[name]))
        for row in rows
    }
    sizes = {row.path: found.weights[row.path].nbytes for row in rows}
    if json:
        about = lambda row: {"tensors": made_of[row.path], "bytes": sizes[row.path]}
        return print_json({"weights": [row._asdict() | about(row) for row in rows]})
    alike: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        alike.setdefault((re.sub(r"\d+", "#", row.path), row.layout), []).append(row)
    printed = (
        (
            "\n".join(fold(row.path for row in group)),
            "\n".join(fold(name for row in group for name in made_of[row.path])),
            layout,
            human_bytes(sum(sizes[row.path] for row in group)),
        )
        for (_, layout), group in alike.items()
    )
    return print_out(table(["weight", "tensors", "layout", "bytes"], printed))


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
