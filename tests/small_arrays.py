"""A few small arrays of many kinds, and what a folder should hold of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.checkpoint import open_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "odd": rng.normal(size=(3, 5)).astype(np.float32),
        "embed": rng.normal(size=(16, 64)).astype(np.float32),
        "norm": rng.normal(size=(64,)).astype(BF16),
        "ids": np.arange(7, dtype=np.int32),
        "mask": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }


def lazy(tensors):
    return {name: ArrayTensor(array) for name, array in tensors.items()}


def contents(folder):
    tensors = open_checkpoint(folder).items()
    return {name: (t.dtype, t.shape, t.read().tobytes()) for name, t in tensors}


def raw(tensors):
    return {n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()}
