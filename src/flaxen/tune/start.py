"""How a new adapter starts.

Source: Gaussian and Kaiming as in PEFT; PiSSA, https://arxiv.org/abs/2404.02948.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from flaxen.layers.linear import Linear
from flaxen.tune.leaf import LowRank, plain, root

INITS = r"normal|gaussian|kaiming|pissa(_niter_\d+)?"
"""normal: variance 1 / inputs; gaussian: standard deviation 1 / rank; kaiming: uniform with
variance 1 / (3 inputs), PEFT's default; pissa: the weight's largest singular values, exactly or by
so many rounds of subspace iteration.
"""


def started(
    layer: Linear,
    paths: Sequence[str],
    ranks: Sequence[int],
    scale: float,
    init: str,
    seed: int,
    folded: bool,
) -> list[LowRank]:
    """The leaves of a new adapter, host arrays; the ranks of stacked layers may differ, and 0 is
    none: rows of `a` are then zero as `b` is, so that no gradient ever reaches them.
    """
    shape, split = layer.weight.shape, len(layer.weight.shape) - layer.contract
    outs, ins, top = shape[int(folded) : split], shape[split:], max(ranks)
    a = np.zeros((len(paths), top, *ins), np.float32)
    b = np.zeros((len(paths), *outs, top), np.float32)
    pissa = init.startswith("pissa")
    for i, (path, rank) in enumerate(zip(paths, ranks, strict=True)):
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
        if pissa:
            weight = np.asarray(_values(layer, i, folded)).reshape(math.prod(outs), -1)
            low, high = principal(weight, rank, init, draw)
            a[i, :rank] = (low / math.sqrt(scale)).reshape(rank, *ins)
            b[i, ..., :rank] = (high / math.sqrt(scale)).reshape(*outs, rank)
        elif rank:
            a[i, :rank] = _drawn(draw, (rank, *ins), init)
    a, b = (a, b) if folded else (a[0], b[0])
    leaf = LowRank(weight=None, a=a, b=b, scale=scale)
    if not pissa:
        return [leaf]
    # What the adapter starts as is taken away again, so that the weight itself can stay.
    return [LowRank(weight=None, a=a, b=b, scale=-scale, frozen=True), leaf]


def _drawn(draw: np.random.Generator, shape: tuple[int, ...], init: str) -> np.ndarray:
    ins = math.prod(shape[1:])
    if init == "kaiming":
        return draw.uniform(-(ins**-0.5), ins**-0.5, shape).astype(np.float32)
    std = 1 / shape[0] if init == "gaussian" else ins**-0.5
    return draw.standard_normal(shape, np.float32) * np.float32(std)


def _values(layer: Linear, i: int, folded: bool) -> jax.Array:
    weight = root(layer.weight)
    return plain(jax.tree.map(lambda x: x[i], weight) if folded else weight)


def principal(
    weight: np.ndarray, rank: int, init: str, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """a (rank, in) and b (out, rank), b a being the best approximation of a weight (out, in)."""
    if "_niter_" in init:
        # A few columns more than are kept make a subspace that is nearly exact.
        q = weight @ draw.standard_normal((weight.shape[1], min(rank + 10, *weight.shape)))
        for _ in range(int(init.rpartition("_")[2])):
            q = weight @ (weight.T @ np.linalg.qr(q)[0])
        q = np.linalg.qr(q)[0]
        u, s, vt = np.linalg.svd(q.T @ weight, full_matrices=False)
        u = q @ u
    else:
        u, s, vt = np.linalg.svd(weight, full_matrices=False)
    half = np.sqrt(s[:rank])
    return half[:, None] * vt[:rank], u[:, :rank] * half
