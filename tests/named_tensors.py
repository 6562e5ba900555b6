"""Small checkpoints in memory, told apart by their values."""

from __future__ import annotations

import numpy as np

from flaxen.convert.arrays import ArrayTensor


def array(shape, value=None):
    """Filled with a value, or with noise."""
    if value is None:
        value = np.random.default_rng(len(shape)).standard_normal(shape)
    return ArrayTensor(np.broadcast_to(np.float32(value), shape).copy())


def named(*names):
    """A tensor for each name, told apart by its value."""
    return {name: array((2,), value) for value, name in enumerate(names)}


def wanted(*names):
    return dict.fromkeys(names, (2,))


def became(view, tensors):
    """The model's name -> the key whose values it has."""
    keys = {tensor.read().tobytes(): key for key, tensor in tensors.items()}
    return {name: keys[tensor.read().tobytes()] for name, tensor in view.items()}


def equal(left, right):
    """Whether both hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(a, b):
    return (a.shape, a.dtype, a.read().tobytes()) == (b.shape, b.dtype, b.read().tobytes())
