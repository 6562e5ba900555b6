"""`flaxen convert`: any checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flaxen.cli.options import Json, Loading, Source, about
from flaxen.cli.output import print_json, print_out
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.model import Model


def convert(
    source: Source,
    folder: Annotated[str, about("The folder to write.")],
    *,
    dtype: Annotated[str | None, about("float32, bfloat16, ...; default: as stored.")] = None,
    max_shard_size: Annotated[str, about("Files no larger than this, if tensors allow.")] = "5GB",
    dry_run: Annotated[
        bool, about("Print which tensor becomes which weight, write nothing.")
    ] = False,
    overwrite: Annotated[bool, about("Replace a model that is in the folder.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    if dry_run:
        return _relation(source, dtype, json)
    if (Path(folder) / "config.json").exists() and not overwrite:
        raise InputError(f"{folder!r} holds a model; add --overwrite to replace it.")
    import flaxen

    model = Loading(dtype=dtype).load(source)
    # A folder's tokenizer files are copied; a GGUF file has its tokenizer inside.
    tok = flaxen.tokenizer(source) if source.endswith(".gguf") else None
    model.save(folder, max_shard_size=max_shard_size, tokenizer=tok)
    return _summary(model, folder, json)


def _relation(source: str, dtype: str | None, json: bool) -> None:
    from flaxen.convert.relation import relate
    from flaxen.families import find
    from flaxen.show import human_bytes, table

    model = Loading(dtype=dtype).load(source, abstract=True, scan_layers=False)
    rows = list(relate(model.module, find(model.config.model_type).names).table())
    if json:
        return print_json([row._asdict() for row in rows])
    printed = (
        (row.path, _together(row.names), row.layout, human_bytes(row.nbytes)) for row in rows
    )
    return print_out(table(["weight", "tensors", "layout", "bytes"], printed))


def _together(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _summary(model: Model, folder: str, json: bool) -> None:
    from flaxen.show import human_bytes, parts, table, totals

    files = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir())}
    if json:
        return print_json({"folder": folder, "files": files, **totals(parts(model.module))})
    rows = ((name, human_bytes(size)) for name, size in files.items())
    return print_out(table(["file", "size"], rows, title=folder))
