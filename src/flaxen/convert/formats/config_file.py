"""A model's config.json alone: no header of a weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxen.convert.formats.checkpoint import open_checkpoint, read_json
from flaxen.convert.formats.hub import hub_name, local
from flaxen.convert.formats.hub_files import FILES, Chosen, ReadJson, join
from flaxen.core.errors import CheckpointError

CONFIG = "config.json"


def model_config(
    path: str | Path, *, revision: str | None = None, token: str | None = None
) -> dict[str, Any]:
    """The keys of a config.json, of a folder with one, or of a hub id, of which nothing else is
    fetched. A file of weights that describes itself, as GGUF does, is asked for its header.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        if not (here / CONFIG).is_file():
            raise CheckpointError(f"{path} has no {CONFIG}, which says what model it is.")
        return read_json(here / CONFIG)
    if here.is_file():
        if here.suffix == ".json":
            return read_json(here)
        with open_checkpoint(here) as checkpoint:
            return checkpoint.config
    if here.suffix == ".json":
        raise CheckpointError(f"There is no file {path}.")
    if str(path).endswith(FILES):
        with open_checkpoint(path, revision=revision, token=token, remote=True) as checkpoint:
            return checkpoint.config
    return read_json(local(hub_name(str(path), revision, token), _config_file) / CONFIG)


def _config_file(files: Iterable[str], path: str, read: ReadJson) -> Chosen:
    return Chosen(path, [join(path, CONFIG)], [])
