"""Checkpoints whose config has a `quantization_config`, under the plain names of their weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.formats.quantized_checks import (
    ANY,
    Settings,
    Shape,
    check,
    check_settings,
    group,
    is_size,
    need,
    number,
)
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.schemes.base import QuantizedTensor, Scheme
from flaxen.convert.schemes.fp8_blocks import Fp8Blocks
from flaxen.convert.schemes.int_groups import WORD, Awq, Gptq
from flaxen.convert.schemes.mxfp4 import BLOCK, Mxfp4Experts
from flaxen.core.errors import CheckpointError


class Found(NamedTuple):
    """A quantised weight: its name, how it is stored, and its parts as (role, stored name)."""

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    parts: dict[str, str]


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with plain weights in place of quantised ones; others pass unchanged.

    Each weight is a lazy view of its codes and scales. It is worked out in float32 and rounded
    once: to the config's dtype, else to float16 if its scales are, else to bfloat16; or, under
    `astype`, to that dtype alone. The config loses its `quantization_config`, which is then in
    `.quantization`.

    Raises:
        CheckpointError: for another method than fp8, mxfp4, awq and gptq, or parts of a weight that
            are absent or do not fit together.
    """
    method = check_settings(checkpoint, tuple(READERS))
    if method is None:
        return checkpoint
    about = checkpoint.config["quantization_config"]
    tensors: dict[str, LazyTensor] = dict(checkpoint)
    for found in READERS[method](checkpoint, about):
        parts = {role: tensors.pop(name) for role, name in found.parts.items()}
        if found.name in tensors:
            raise CheckpointError(
                f"{found.name!r} is there as it is and quantised too ({found.parts}). Keep one."
            )
        kind = _said(checkpoint.config) or _of_scales(parts)
        tensors[found.name] = QuantizedTensor(found.scheme, parts, found.shape, kind)
    return Checkpoint(
        tensors,
        counter=checkpoint.counter,
        config={k: v for k, v in checkpoint.config.items() if k != "quantization_config"},
        generation_config=checkpoint.generation_config,
        folder=checkpoint.folder,
        format=f"{checkpoint.format} ({method})",
        files=checkpoint.files,
        metadata=checkpoint.metadata,
        close=checkpoint.close,
        quantization=dict(about),
    )


def _said(config: Settings) -> np.dtype | None:
    for where in (config, config.get("text_config") or {}):
        name = str(where.get("dtype") or where.get("torch_dtype") or "").removeprefix("torch.")
        if name in ("bfloat16", "float16", "float32"):
            return np.dtype(getattr(ml_dtypes, name, name))
    return None


def _of_scales(parts: Mapping[str, LazyTensor]) -> np.dtype:
    half = "scales" in parts and parts["scales"].dtype == np.float16
    return np.dtype(np.float16 if half else ml_dtypes.bfloat16)


FP8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
SCALES = (np.float32, ml_dtypes.bfloat16, np.float16)
EXPONENTS = (np.uint8, ml_dtypes.float8_e8m0fnu)


def _fp8(tensors: Mapping[str, LazyTensor], about: Settings) -> Iterator[Found]:
    size = about.get("weight_block_size")
    if size is not None and not _is_block(size):
        raise CheckpointError(
            f"quantization_config says weight_block_size={size!r}; expected two sizes above 0."
        )
    for name, tensor in tensors.items():
        scales = f"{name}_scale_inv"
        plain = scales not in tensors and _left_alone(name, about)
        if tensor.dtype in FP8 and tensor.ndim > 1 and not plain:
            need(tensors, name, scales)
            check(tensors, scales, Shape((*SCALES, *EXPONENTS), tensors[scales].shape))
            block = _block(name, tensor.shape, tensors[scales].shape, size)
            parts = {"weight": name, "weight_scale_inv": scales}
            inputs = f"{name.rpartition('.')[0]}.activation_scale"
            if inputs in tensors:
                # It rounds what the weight is multiplied with, not the weight.
                parts["activation_scale"] = inputs
            yield Found(name, Fp8Blocks(block), tensor.shape, parts)
        elif scales in tensors:
            check(tensors, name, Shape(FP8, tensor.shape))


def _is_block(size: Any) -> bool:
    return isinstance(size, list | tuple) and len(size) == 2 and all(is_size(n) for n in size)


def _left_alone(name: str, about: Settings) -> bool:
    named = about.get("modules_to_not_convert") or ()
    module = name.rpartition(".")[0]
    return any(f".{module}.".find(f".{part}.") >= 0 for part in named)


def _block(name: str, shape: tuple[int, ...], grid: tuple[int, ...], size: Any) -> tuple[int, int]:
    """The config's block size where the scales fit it, else the one that divides evenly."""
    rows, columns = shape[-2:]
    if all(n == 1 for n in grid):
        return rows, columns
    if len(grid) == len(shape) and grid[:-2] == shape[:-2]:
        if size and grid[-2:] == (-(-rows // size[0]), -(-columns // size[1])):
            return size[0], size[1]
        if 0 not in grid and rows % grid[-2] == 0 and columns % grid[-1] == 0:
            return rows // grid[-2], columns // grid[-1]
    raise CheckpointError(
        f"{name!r} has shape {list(shape)} and scales of shape {list(grid)}, which do not make "
        f"blocks of {size or 'one size'}. Fetch or write the checkpoint again."
    )


def _mxfp4(tensors: Mapping[str, LazyTensor], about: Settings) -> Iterator[Found]:
    for stored, blocks in tensors.items():
        if not stored.endswith("_blocks"):
            continue
        name = stored.removesuffix("_blocks")
        scales = f"{name}_scales"
        need(tensors, stored, scales)
        check(tensors, stored, Shape((np.uint8,), (ANY, ANY, ANY, BLOCK // 2)))
        check(tensors, scales, Shape((np.uint8,), blocks.shape[:-1]))
        experts, outs, groups, _ = blocks.shape
        parts = {"blocks": stored, "scales": scales}
        yield Found(name, Mxfp4Experts(), (experts, groups * BLOCK, outs), parts)


def _awq(tensors: Mapping[str, LazyTensor], about: Settings) -> Iterator[Found]:
    kind = str(about.get("version") or about.get("format") or "gemm").lower()
    if kind != "gemm" or about.get("backend") == "llm-awq":
        raise CheckpointError(
            f"The checkpoint is packed for AWQ's {kind!r} kernel; supported is 'gemm'."
        )
    number(about, ("bits", "w_bit"), 4, (4,))
    size = group(about)
    for name, stored in _packed(tensors, ("qzeros", "scales")):
        ins, words = _matrix(tensors, stored["qweight"])
        run = ins if size == -1 else size
        groups = -(-ins // run)
        check(tensors, stored["qzeros"], Shape((np.int32,), (groups, words)))
        check(tensors, stored["scales"], Shape(SCALES, (groups, words * 8)))
        yield Found(name, Awq(run), (words * 8, ins), stored)


def _gptq(tensors: Mapping[str, LazyTensor], about: Settings) -> Iterator[Found]:
    kind = about.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"The checkpoint is of GPTQ's format {kind!r}; supported are 'gptq' and 'gptq_v2'."
        )
    bits = number(about, ("bits",), None, (2, 3, 4, 8))
    size = group(about)
    for name, stored in _packed(tensors, ("qzeros", "scales"), ("g_idx",)):
        words, outs = _matrix(tensors, stored["qweight"])
        if words * WORD % bits or outs * bits % WORD:
            raise CheckpointError(
                f"{stored['qweight']!r} has shape {[words, outs]}, whose {bits}-bit numbers fill "
                "no whole words. Fetch or write the checkpoint again."
            )
        ins = words * WORD // bits
        run = ins if size == -1 else size
        groups = -(-ins // run)
        check(tensors, stored["qzeros"], Shape((np.int32,), (groups, outs * bits // WORD)))
        check(tensors, stored["scales"], Shape(SCALES, (groups, outs)))
        index = _index(tensors, stored, ins, groups)
        by_index = index is not None and not np.array_equal(index, np.arange(ins) // run)
        scheme = Gptq(bits, run, int(kind == "gptq"), by_index)
        yield Found(name, scheme, (outs, ins), stored)


def _index(
    tensors: Mapping[str, LazyTensor], stored: Mapping[str, str], ins: int, groups: int
) -> np.ndarray | None:
    """The group of each input, which is read at once: a number that is none would be found late."""
    if "g_idx" not in stored:
        return None
    check(tensors, stored["g_idx"], Shape((np.int32,), (ins,)))
    index = tensors[stored["g_idx"]].read()
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CheckpointError(
            f"{stored['g_idx']!r} holds groups from {index.min()} to {index.max()}; the weight has "
            f"{groups}. Fetch or write the checkpoint again."
        )
    return index


def _packed(
    tensors: Mapping[str, LazyTensor], needed: tuple[str, ...], known: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Each weight's plain name, and its parts' names by their last piece."""
    for packed in tensors:
        match = re.fullmatch(r"(.*\.|)qweight", packed)
        if match is None:
            continue
        module = match[1]
        for role in needed:
            need(tensors, packed, module + role)
        held = [role for role in ("qweight", *needed, *known) if module + role in tensors]
        yield f"{module}weight", {role: module + role for role in held}


def _matrix(tensors: Mapping[str, LazyTensor], name: str) -> tuple[int, int]:
    check(tensors, name, Shape((np.int32,), (ANY, ANY)))
    return tensors[name].shape[0], tensors[name].shape[1]


READERS: dict[str, Callable[[Mapping[str, LazyTensor], Settings], Iterator[Found]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
}
