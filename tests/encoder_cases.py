"""Tiny encoders with all their heads: what Transformers on torch makes of them
(`conformance/make_encoders.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import golden
import numpy as np
from safetensors.numpy import save_file

FOLDER = golden.DATA / "encoders"


def names() -> list[str]:
    """All cases, as `bert-single`."""
    files = sorted(FOLDER.glob("*.json"))
    return [f"{file.stem}/{name}" for file in files for name in json.loads(file.read_text())]


@dataclasses.dataclass(frozen=True)
class Case:
    """config and weights of a file; what goes in, what comes out; norms of gradients by name."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    given: dict[str, np.ndarray]
    want: dict[str, np.ndarray]
    norms: dict[str, float]


@functools.cache
def _file(model_type: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{model_type}.json").read_text())


def config(name: str) -> dict[str, Any]:
    """The config of a case alone."""
    model_type, _, own = name.partition("/")
    return _file(model_type)[own]["config"]


def case(name: str) -> Case:
    model_type, _, own = name.partition("/")
    about = _file(model_type)[own]
    weights = {
        key: golden.weight(key, shape, base, scale, dtype)
        for key, shape, dtype, base, scale in about["tensors"]
    }
    with np.load(FOLDER / f"{model_type}.npz") as file:
        arrays = {k.removeprefix(f"{own}/"): file[k] for k in file if k.startswith(f"{own}/")}
    part = lambda of: {k.removeprefix(of): v for k, v in arrays.items() if k.startswith(of)}
    return Case(about["config"], weights, part("in/"), part("out/"), about["grad_norms"])


def write(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
