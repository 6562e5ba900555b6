"""Small quantised weights: what a checkpoint stores, and their values in float64.

Packing and values follow the published formulas one number at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.save import write_checkpoint

FP8 = ml_dtypes.float8_e4m3fn
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Stored(NamedTuple):
    """The parts of a weight by the last piece of their names, and its values [out, in]."""

    parts: dict[str, np.ndarray]
    values: np.ndarray


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    write_checkpoint({n: ArrayTensor(np.asarray(a)) for n, a in tensors.items()}, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def e4m3(code: int) -> float:
    """One float8 of four exponent and three mantissa bits; no code of it here is NaN."""
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def fp8(rng: np.random.Generator, out: int, ins: int, block: tuple[int, int]) -> Stored:
    codes = rng.integers(0, 127, (out, ins), np.uint8) + rng.choice([0, 128], (out, ins))
    grid = -(-out // block[0]), -(-ins // block[1])
    scales = rng.uniform(1e-4, 1e-3, grid).astype(np.float32)
    values = np.zeros((out, ins))
    for o in range(out):
        for i in range(ins):
            scale = float(scales[o // block[0], i // block[1]])
            values[o, i] = e4m3(int(codes[o, i])) * scale
    weight = codes.astype(np.uint8).view(FP8)
    return Stored({"weight": weight, "weight_scale_inv": scales}, values)


def mxfp4(rng: np.random.Generator, experts: int, ins: int, out: int) -> Stored:
    """Values are [experts, in, out]."""
    blocks = rng.integers(0, 256, (experts, out, ins // 32, 16), np.uint8)
    scales = rng.integers(115, 130, (experts, out, ins // 32), np.uint8)
    values = np.zeros((experts, ins, out))
    for e, o, g, byte in np.ndindex(blocks.shape):
        power = 2.0 ** (int(scales[e, o, g]) - 127)
        low, high = int(blocks[e, o, g, byte]) % 16, int(blocks[e, o, g, byte]) // 16
        values[e, g * 32 + 2 * byte, o] = E2M1[low] * power
        values[e, g * 32 + 2 * byte + 1, o] = E2M1[high] * power
    return Stored({"blocks": blocks, "scales": scales}, values)


def awq(rng: np.random.Generator, out: int, ins: int, group: int) -> Stored:
    groups = -(-ins // group)
    codes, zeros, scales = _numbers(rng, 4, out, ins, groups)

    def packed(numbers: np.ndarray) -> np.ndarray:
        words = np.zeros((len(numbers), out // 8), np.uint32)
        for row, column, place in np.ndindex(len(numbers), out // 8, 8):
            number = int(numbers[row, column * 8 + AWQ_ORDER[place]])
            words[row, column] |= np.uint32(number << (4 * place))
        return words.view(np.int32)

    parts = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    return Stored(parts, _values(codes, zeros, scales, [i // group for i in range(ins)]))


def gptq(
    rng: np.random.Generator,
    out: int,
    ins: int,
    group: int,
    bits: int = 4,
    less: int = 1,
    order: np.ndarray | None = None,
) -> Stored:
    """order: the group of each input, if not one run of inputs after the other."""
    groups = -(-ins // group)
    codes, zeros, scales = _numbers(rng, bits, out, ins, groups)
    of = [i // group for i in range(ins)] if order is None else order.tolist()
    stored = (zeros - less) % 2**bits
    parts = {
        "qweight": np.stack([_stream(codes[:, o], bits) for o in range(out)], axis=1),
        "qzeros": np.stack([_stream(stored[g], bits) for g in range(groups)]),
        "scales": scales,
        "g_idx": np.array(of, np.int32),
    }
    return Stored(parts, _values(codes, zeros, scales, of))


def _numbers(rng: np.random.Generator, bits: int, out: int, ins: int, groups: int) -> Any:
    codes, zeros = (rng.integers(0, 2**bits, (n, out)) for n in (ins, groups))
    return codes, zeros, rng.uniform(1e-3, 1e-2, (groups, out)).astype(np.float16)


def _stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers one after the other in one long integer, cut into words of 32 bits."""
    long = sum(int(number) << (bits * i) for i, number in enumerate(numbers))
    count = len(numbers) * bits // 32
    return np.array([long >> (32 * i) & (2**32 - 1) for i in range(count)], np.uint32).view(
        np.int32
    )


def _values(codes: Any, zeros: Any, scales: Any, of: list[int]) -> np.ndarray:
    ins, out = codes.shape
    values = np.zeros((out, ins))
    for o in range(out):
        for i in range(ins):
            step = int(codes[i, o]) - int(zeros[of[i], o])
            values[o, i] = step * float(scales[of[i], o])
    return values
