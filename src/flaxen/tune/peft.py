"""Adapter folders in the format of the PEFT library: adapter_config.json and
adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.formats.checkpoint import read_json
from flaxen.convert.formats.safetensors import open_safetensors
from flaxen.convert.relation import Join, renamer
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.core.tree import paths
from flaxen.layers.linear import Linear
from flaxen.models.fold import Folded, in_body
from flaxen.tune.lora import (
    adapter_shapes,
    adapters,
    map_linears,
    scale_of,
    with_adapter,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "target_parameters": (None, []),
}
"""Keys of the config that change what an adapter computes, and the values we can follow."""

NUMBERS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("r", lambda x: type(x) is int and 0 < x < 2**31, "a whole number of 1 or more"),
    ("lora_alpha", lambda x: type(x) in (int, float) and abs(x) < 1e30, "a number"),
    ("use_rslora", lambda x: x in (None, True, False), "true or false"),
]
"""What the scale of an adapter is made of."""


def save_adapter(
    tree: Any,
    folder: str | os.PathLike[str],
    names: Mapping[str, Any],
    *,
    alpha: float,
    rank_stabilised: bool = False,
    fan_in_fan_out: bool = False,
    base: str | None = None,
) -> Path:
    """Write the adapters of a model; `names` is its family's table, `base` the name of the model
    they belong to. A head that a task began with is written whole. `fan_in_fan_out` tells PEFT that
    the projections lie `[in, out]` in the base's file; adapters look the same either way.

    Raises:
        ConfigError: when the model has none, or one on a part of a tensor of the file.
    """
    from safetensors.numpy import save_file

    found = adapters(tree)
    if not found:
        raise ConfigError("This model has no adapters to save; were they merged?")
    check_apart(found, names)
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in found.items():
        modules = _modules(tree, path.removesuffix(".weight"), names)
        for side, array in (("A", leaf.a), ("B", leaf.b)):
            for module, one in zip(modules, _each(np.asarray(array), leaf.stacked), strict=True):
                flat = (leaf.rank, -1) if side == "A" else (-1, leaf.rank)
                tensors[f"{PREFIX}{module}.lora_{side}.weight"] = one.reshape(flat)
    heads = _heads(tree, names)
    tensors |= {f"{PREFIX}{name}": np.asarray(weight) for name, weight in heads.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "modules_to_save": sorted({name.rpartition(".")[0] for name in heads}) or None,
        "base_model_name_or_path": base,
        "r": next(iter(found.values())).rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stabilised,
        "target_modules": _targets(tree, found, names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _heads(tree: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that are trained in full beside adapters, by the names of the hub."""
    rename, starts = renamer(names), tuple(f"{head}." for head in tree.heads())
    return {rename(path): x for path, x in paths(tree).items() if path.startswith(starts)}


def load_adapter(tree: Any, folder: str | os.PathLike[str], names: Mapping[str, Any]) -> Any:
    """The model with the adapters of a PEFT folder. A layer without one inside a folded model gets
    zeros.

    Raises:
        CheckpointError: files that are absent or damaged, or tensors that do not fit the model.
        ConfigError: a kind of adapter that would compute something else here, or a model that has
            adapters.
    """
    if adapters(tree):
        raise ConfigError("This model has adapters already; merge them before loading others.")
    config, left = _read(Path(folder))
    rank, folded = config["r"], in_body(tree)
    scale = scale_of(rank, config["lora_alpha"], bool(config.get("use_rslora")))
    problems: list[str] = []

    def adapt(path: str, layer: Linear) -> Linear:
        keys = [f"{PREFIX}{module}" for module in _modules(tree, path, names)]
        if not any(f"{key}.lora_{side}.weight" in left for key in keys for side in "AB"):
            return layer
        shapes, sides = adapter_shapes(layer, rank, folded(path)), []
        for side, shape in zip("AB", shapes, strict=True):
            one = shape[1:] if folded(path) else shape
            flat = (rank, math.prod(one[1:])) if side == "A" else (math.prod(one[:-1]), rank)
            found = {key: left.pop(f"{key}.lora_{side}.weight", None) for key in keys}
            wrong = [(k, x.shape) for k, x in found.items() if x is not None and x.shape != flat]
            problems.extend(f"{k}.lora_{side} is {is_}, expected {flat}" for k, is_ in wrong)
            sides.append((shape, flat, found))
        halves = [key for key in keys if len({found[key] is None for *_, found in sides}) == 2]
        problems.extend(f"{key} has only one of lora_A and lora_B" for key in halves)
        if problems:
            return layer
        full = [_stacked(found.values(), flat).reshape(shape) for shape, flat, found in sides]
        return with_adapter(layer, full[0], full[1], scale)

    adapted = map_linears(adapt, tree)
    problems += [f"the model has no place for {key}" for key in sorted(left)]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"The adapter in {folder} does not fit this model: {'; '.join(problems[:5])}{more}."
        )
    return adapted


def _modules(tree: Any, path: str, names: Mapping[str, Any]) -> list[str]:
    """The hub names of the modules that a (stacked) projection stands for."""
    rename = renamer(names)
    layers, found = tree.layers, re.fullmatch(r"layers\.(head|body|tail)\.(\d+)(\..+)", path)
    if found is None or not isinstance(layers, Folded):
        return [rename(path)]
    part, place, rest = found[1], int(found[2]), found[3]
    return [rename(f"layers.{i}{rest}") for i in layers.indices(part, place)]


def _stacked(parts: Iterable[np.ndarray | None], shape: tuple[int, ...]) -> np.ndarray:
    """The parts one above the other, zeros where there is none."""
    zeros = np.zeros(shape, np.float32)
    return np.stack([zeros if part is None else part.astype(np.float32) for part in parts])


def check_apart(found: Iterable[str], names: Mapping[str, Any]) -> None:
    """Adapters, by the path of their weight, can be saved.

    Raises:
        ConfigError: one is on a part of a fused projection, so no module of the hub is its own.
    """
    joined = {label for x in names.values() if isinstance(x, Join) for label in x.parts}
    wrong = [p for p in found if p.removesuffix(".weight").endswith(tuple(f".{j}" for j in joined))]
    if wrong:
        raise ConfigError(
            f"An adapter on {wrong[0]} cannot be saved: in the file of this family that "
            f"projection is a part of a larger one, as are all of {', '.join(sorted(joined))}. "
            "Adapt other projections, or merge (flaxen.tune.merge)."
        )


def _targets(tree: Any, found: Iterable[str], names: Mapping[str, Any]) -> list[str]:
    """The last words of the adapted modules' names: as many as tell them from all others."""
    every = paths(tree, is_leaf=lambda x: isinstance(x, Linear))
    linears = [path for path, x in every.items() if isinstance(x, Linear)]
    adapted = {path.removesuffix(".weight") for path in found}
    word = lambda path, n: ".".join(_modules(tree, path, names)[0].split(".")[-n:])
    others = [path for path in linears if path not in adapted]
    taken = {word(path, 1) for path in others}
    return sorted({word(p, 2 if word(p, 1) in taken else 1) for p in adapted})


def _each(array: np.ndarray, stacked: int) -> list[np.ndarray]:
    return list(array) if stacked else [array]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of an adapter folder, refused where we cannot follow them
    exactly.
    """
    absent = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder / absent[0]} is not there; an adapter folder has {CONFIG} and {WEIGHTS}."
        )
    config = read_json(folder / CONFIG)
    with open_safetensors(folder / WEIGHTS) as checkpoint:
        tensors = {name: tensor.read() for name, tensor in checkpoint.items()}
    wrong = [
        f"{key}={config[key]!r}"
        for key, good in ONLY.items()
        if config.get(key, good[0]) not in good
    ]
    if wrong:
        raise ConfigError(
            f"{folder / CONFIG} asks for {', '.join(wrong)}, which is not supported. "
            "Merge that adapter with the library that made it, and load the merged model."
        )
    for key, fits, words in NUMBERS:
        if not fits(config.get(key)):
            raise ConfigError(
                f"{folder / CONFIG} says {key}={config.get(key)!r}; expected {words}."
            )
    return config, tensors
