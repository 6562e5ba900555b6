"""What a quantised checkpoint says of itself, held against what it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import CheckpointError

Settings = Mapping[str, Any]
ANY = -1
PACKED = (".qweight", ".weight_scale_inv")
"""How names end that only quantised checkpoints have."""


class Shape(NamedTuple):
    """What a stored tensor should be; any size where the shape says ANY."""

    dtypes: tuple[Any, ...]
    shape: tuple[int, ...]


def check_settings(checkpoint: Checkpoint, known: tuple[str, ...]) -> str | None:
    """The method of a checkpoint; None if it is not quantised.

    Raises:
        CheckpointError: for another method than those known, settings that are none, or none at all
            where there are packed tensors.
    """
    about = checkpoint.config.get("quantization_config")
    if about is None:
        packed = next((name for name in checkpoint if name.endswith(PACKED)), None)
        if packed is not None and checkpoint.config:
            raise CheckpointError(
                f"{packed!r} is quantised, but config.json has no quantization_config. Add it: "
                "older checkpoints have it in quantize_config.json or quant_config.json, without "
                'its quant_method ("gptq" or "awq").'
            )
        return None
    is_object = isinstance(about, Mapping)
    method = about.get("quant_method") if is_object else about
    if not is_object or not isinstance(method, str) or method not in known:
        raise CheckpointError(
            f"The checkpoint is quantised with {method!r}; supported are "
            f"{', '.join(known)} (not bitsandbytes, compressed-tensors, torchao and others). Use "
            "an unquantised version."
        )
    plain = about.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise CheckpointError(
            f"quantization_config says modules_to_not_convert={plain!r}; expected a list of names."
        )
    return method


def is_size(n: Any) -> bool:
    return type(n) is int and n > 0


def need(tensors: Mapping[str, LazyTensor], name: str, other: str) -> None:
    if other not in tensors:
        raise CheckpointError(
            f"{name!r} is quantised, but {other!r} is not in the checkpoint. Fetch all its files."
        )


def check(tensors: Mapping[str, LazyTensor], name: str, expected: Shape) -> None:
    tensor, wanted = tensors[name], expected.shape
    fits = len(tensor.shape) == len(wanted) and all(
        want in (ANY, n) for n, want in zip(tensor.shape, wanted, strict=True)
    )
    if tensor.dtype not in expected.dtypes or not fits:
        kinds = " or ".join(np.dtype(d).name for d in expected.dtypes)
        sizes = ", ".join("any" if n == ANY else str(n) for n in wanted)
        raise CheckpointError(
            f"{name!r} is {tensor.dtype}{list(tensor.shape)}, expected {kinds}[{sizes}]. Fetch or "
            "write the checkpoint again."
        )


def number(
    about: Settings, keys: tuple[str, ...], default: int | None, known: tuple[int, ...]
) -> int:
    value = next((about[key] for key in keys if about.get(key) is not None), default)
    if type(value) is not int or value not in known:
        raise CheckpointError(
            f"quantization_config says {keys[0]}={value!r}; supported are {list(known)}."
        )
    return value


def group(about: Settings) -> int:
    value: Any = next((about[k] for k in ("group_size", "q_group_size") if k in about), None)
    if value != -1 and not is_size(value):
        raise CheckpointError(
            f"quantization_config says group_size={value!r}; expected a size above 0, or -1."
        )
    return value
