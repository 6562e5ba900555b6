"""Models with the adapter of a PEFT folder."""

from __future__ import annotations

import os
from pathlib import Path

from flaxen.convert.formats.checkpoint import read_json
from flaxen.core.errors import CheckpointError
from flaxen.families import find
from flaxen.model import Model
from flaxen.tune import load_adapter
from flaxen.tune.peft import CONFIG


def base_of(path: str | Path) -> str | None:
    """Where the base model of an adapter folder is; None for anything else.

    Raises:
        CheckpointError: the adapter does not say what it adapts.
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
    return str(beside) if not os.path.exists(base) and os.path.isdir(beside) else base


def adapted(model: Model, folder: str | Path) -> Model:
    """The model with an adapter on top; `flaxen.tune.merge` works it in.

    Raises:
        CheckpointError, ConfigError: the adapter does not fit the model, or cannot be followed.
    """
    names = find(model.config.model_type).names
    return model.replace(module=load_adapter(model.module, folder, names))
