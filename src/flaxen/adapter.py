"""Models with adapters: those of PEFT folders, new ones, several at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxen import tune
from flaxen.convert.formats.checkpoint import read_json
from flaxen.convert.formats.hub import download
from flaxen.convert.formats.hub_files import adapter_files
from flaxen.convert.relation import Relation, relate
from flaxen.core.errors import CheckpointError
from flaxen.families import find
from flaxen.families.config import described
from flaxen.tune.config import CONFIG

Folders = str | Path | Mapping[str, str | Path]
"""A PEFT folder or the hub id of one, or several by the names they are to have."""


class Adapting:
    """The methods of a Model about its adapters, under PEFT's names. Each gives a new Model, with
    the weights of this one; compiled programs are kept for each set of active adapters.
    """

    def add_adapter(self: Any, adapter_name: str = tune.DEFAULT, **options: Any) -> Any:
        """With a new adapter, which changes nothing yet. See `flaxen.tune.add_lora`."""
        return self.replace(module=tune.add_lora(self.module, name=adapter_name, **options))

    def load_adapter(
        self: Any,
        model_id: str | Path,
        adapter_name: str = tune.DEFAULT,
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> Any:
        """With the adapter of a PEFT folder or hub id on top, active. See
        `flaxen.tune.load_adapter`.
        """
        folder = folder_of(model_id, revision, token)
        names = relation_of(self)
        return self.replace(module=tune.load_adapter(self.module, folder, names, name=adapter_name))

    def save_adapter(
        self: Any, folder: str | Path, adapter_name: str | None = None, **options: Any
    ) -> Path:
        """Write one adapter as a PEFT folder. See `flaxen.tune.save_adapter`."""
        held = self.origin.folder
        about = {
            "fan_in_fan_out": find(self.config.model_type).fan_in_fan_out,
            "base": str(held) if held else None,
        }
        return tune.save_adapter(
            self.module, folder, relation_of(self), name=adapter_name, **about | options
        )

    def set_adapters(
        self: Any, names: str | Sequence[str], weights: float | Sequence[float] | None = None
    ) -> Any:
        """With these active, so weighted, and no others. See `flaxen.tune.set_adapters`."""
        return self.replace(module=tune.set_adapters(self.module, names, weights))

    def for_rows(self: Any, names: Sequence[str | None]) -> Any:
        """For batches whose row i has the adapter `names[i]`, or none. See
        `flaxen.tune.for_rows`.
        """
        return self.replace(module=tune.for_rows(self.module, names))

    def delete_adapter(self: Any, names: str | Sequence[str] | None = None) -> Any:
        """Without these adapters, or any. See `flaxen.tune.without_adapters`."""
        return self.replace(module=tune.without_adapters(self.module, names))

    def merge_adapters(self: Any, names: str | Sequence[str] | None = None) -> Any:
        """With adapters worked into the weights. See `flaxen.tune.merge`."""
        return self.replace(module=tune.merge(self.module, names))

    def adapters(self: Any) -> list[str]:
        """The names of its adapters, in the order in which they were put on."""
        return tune.adapter_names(self.module)


class Source(NamedTuple):
    """A model to open, what is put on top, and which revision of the model."""

    path: str | Path
    adapter: Folders | None
    revision: str | None


def source_of(
    path: str | Path,
    adapter: Folders | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    remote: bool = False,
) -> Source:
    """What a path stands for: an adapter, here or on the hub, for the model that it names with it
    on top. Of an adapter on the hub, `revision` is its own; its config says that of the model.

    Raises:
        CheckpointError: the adapter does not say what it adapts, or the hub does not have it.
    """
    if adapter is not None or remote:
        return Source(path, adapter, revision)
    here = os.path.exists(Path(path).expanduser())
    folder = path if here else download(str(path), revision=revision, token=token)
    base = base_of(folder)
    if base is None:
        return Source(folder, None, revision)
    if not here:
        revision = read_json(Path(folder) / CONFIG).get("revision")
    return Source(base, folder, revision)


def folder_of(name: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of an adapter: here, or downloaded."""
    here = Path(name).expanduser()
    if os.path.exists(here) or Path(name).is_absolute():
        return here
    return download(str(name), revision=revision, token=token, choose=adapter_files)


def base_of(path: str | Path) -> str | None:
    """Where the base model of an adapter folder is; None for anything else.

    Raises:
        CheckpointError: the adapter does not say what it adapts, or that is not there.
    """
    about = Path(path).expanduser() / CONFIG
    if not about.is_file() or (about.parent / "config.json").is_file():
        return None
    base = read_json(about).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{about.parent} holds an adapter, and its {CONFIG} does not say of which model. "
            "Load the model and pass this folder as adapter=."
        )
    # A relative path is seen from here, as PEFT does, or else from the adapter's folder.
    beside = about.parent / base
    if not os.path.exists(base) and beside.is_dir():
        return str(beside)
    if not os.path.exists(base) and (os.path.isabs(base) or "/" not in base):
        raise CheckpointError(
            f"{about.parent} holds an adapter of {base!r}, which is no folder here and no hub id. "
            "Load the model from where it is, and pass this folder as adapter=."
        )
    return base


def relation_of(model: Any) -> Relation:
    """Which tensors of its checkpoint the weights of a model live in."""
    abstract, family = described(model.config, tune.without_adapters(model.module))
    return relate(abstract, family.names_of(abstract))


def adapted(model: Any, adapter: Folders, token: str | None = None) -> Any:
    """The model with adapters on top, all of them active.

    Raises:
        CheckpointError, ConfigError: one does not fit the model, or cannot be followed.
    """
    given = adapter if isinstance(adapter, Mapping) else {tune.DEFAULT: adapter}
    for name, folder in given.items():
        model = model.load_adapter(folder, name, token=token)
    return model
