"""Which weights can stay packed, and where their parts go on a mesh."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.lazy import LazyTensor, stack
from flaxen.convert.schemes.base import QuantizedTensor
from flaxen.convert.views import Reshaped, Stacked
from flaxen.core.errors import ConfigError
from flaxen.quantize.leaf import QuantizedWeight

PIECE = 16 << 20
"""Bytes of float32 values that a product works out at a time, if its weight can be cut."""

MOST = 256
"""Pieces of a product."""


def keeps(quantized: str) -> bool:
    """Whether `load(quantized=...)` asks for packed weights.

    Raises:
        ConfigError: for anything but "keep" and "dequantize".
    """
    if quantized not in ("dequantize", "keep"):
        raise ConfigError(f"quantized is {quantized!r}; expected 'dequantize' or 'keep'.")
    return quantized == "keep"


def packed(
    tensors: Mapping[str, LazyTensor],
    where: Mapping[str, NamedSharding | None],
    in_body: Callable[[str], bool],
) -> tuple[dict[str, QuantizedWeight], dict[str, QuantizedWeight]]:
    """Those of a model's weights that can stay packed, as leaves of lazy parts, and as leaves of
    the places of these parts.

    where: the sharding of each plain weight, or None. in_body: whether a path's weight is one of
    equal layers that are stacked.
    """
    found = {
        path: packed_leaf(t, where[path] is not None, in_body(path)) for path, t in tensors.items()
    }
    leaves = {path: leaf for path, leaf in found.items() if leaf is not None}
    return leaves, {path: leaf.shardings(where[path]) for path, leaf in leaves.items()}


def packed_leaf(
    tensor: LazyTensor, whole: bool = False, layers: bool = False
) -> QuantizedWeight | None:
    """A leaf of lazy parts, if the tensor is a quantised matrix reshaped to (out..., in...); None
    for anything else, such as experts, and parts of a fused matrix.

    whole: multiply in one piece, as is best where a mesh cuts the weight. layers: the tensor is one
    such matrix for each layer; what else is stacked, such as experts, looks the same.
    """
    if isinstance(tensor, Stacked):
        return _stacked([packed_leaf(part, whole) for part in tensor.parts]) if layers else None
    source = tensor
    while isinstance(source, Reshaped):
        source = source.parent
    if not isinstance(source, QuantizedTensor) or source.ndim != 2:
        return None
    splits = range(1, tensor.ndim)
    outs = next((i for i in splits if math.prod(tensor.shape[:i]) == source.shape[0]), None)
    if outs is None:
        return None
    return QuantizedWeight(
        parts=source.parts,
        scheme=source.scheme,
        inner=tensor.shape,
        outs=outs,
        dtype=source.dtype,
        pieces=1 if whole else _pieces(source),
    )


def _pieces(tensor: QuantizedTensor) -> int:
    """The smallest number of equal runs of outputs that keeps each below `PIECE`, or the nearest to
    it.
    """
    least = -(-tensor.size * 4 // PIECE)
    fits = [n for n in range(1, MOST + 1) if _cuts_evenly(tensor, n)]
    return next((n for n in fits if n >= least), fits[-1])


def _cuts_evenly(tensor: QuantizedTensor, count: int) -> bool:
    """Whether every run of outputs is made of an equal run of each part."""
    outs, ins = tensor.shape
    scheme, shapes = tensor.scheme, {role: part.shape for role, part in tensor.parts.items()}
    places = {
        role: axes.index("out")
        for role, axes in scheme.axes.items()
        if "out" in axes and len(shapes[role]) == len(axes)
    }
    if any(shapes[role][axis] % count for role, axis in places.items()):
        return False
    for i in range(count):
        run = slice(i * outs // count, (i + 1) * outs // count)
        boxes = scheme.boxes((run, slice(0, ins)), shapes)
        for role, axis in places.items():
            size = shapes[role][axis] // count
            if boxes[role][axis] != slice(i * size, (i + 1) * size):
                return False
    return True


def _stacked(leaves: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    found = [leaf for leaf in leaves if leaf is not None]
    if len(found) < len(leaves) or len({_kind(leaf) for leaf in found}) > 1:
        return None
    parts = {role: stack([leaf.parts[role] for leaf in found]) for role in found[0].parts}
    return dataclasses.replace(found[0], parts=parts)


def _kind(leaf: QuantizedWeight) -> Any:
    parts = tuple((role, part.shape, part.dtype) for role, part in sorted(leaf.parts.items()))
    return leaf.scheme, leaf.inner, leaf.outs, leaf.dtype, parts


def stored_settings(checkpoint: Checkpoint) -> str | None:
    """What saving needs of how a checkpoint is quantised: its config, and which weights are."""
    if checkpoint.quantization is None:
        return None
    weights = [name for name, t in checkpoint.items() if isinstance(t, QuantizedTensor)]
    return json.dumps({"config": checkpoint.quantization, "weights": weights})


def stored_tensors(
    leaves: Mapping[str, QuantizedWeight], settings: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts of packed weights by the names they are stored under, and the
    `quantization_config`, which also names the modules of weights that did not stay packed.

    leaves: by the names of the plain weights.
    """
    about = json.loads(settings)
    tensors = {
        name.removesuffix("weight") + role: part
        for name, leaf in leaves.items()
        for role, part in leaf.parts.items()
    }
    plain = [name.removesuffix(".weight") for name in about["weights"] if name not in leaves]
    config = about["config"]
    if plain:
        listed = config.get("modules_to_not_convert") or []
        config["modules_to_not_convert"] = [*listed, *plain]
    return tensors, config
