"""GPT-2's projection, whose weight lies `[in, out]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot
from flaxen.core.tree import module, param, zeros_param


@module
class Conv1D:
    """x (..., nx) -> (..., nf): x W + b, with W (nx, nf) as in the file and b (nf,)."""

    weight: Any
    bias: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        y = dot(x, jnp.asarray(self.weight).T)
        return y + self.bias.astype(y.dtype)

    def __repr__(self) -> str:
        nx, nf = self.weight.shape
        return f"Conv1D({nf=}, {nx=})"


def conv1d(nf: int, nx: int, axes: tuple[str, str] = ("embed", "mlp")) -> Conv1D:
    """A projection to `nf` from `nx` channels; fresh ones are N(0, 0.02) with a bias of 0.

    axes: the names of the weight's input and output, as in `core/axes.md`.
    """
    src, dst = axes
    return Conv1D(weight=param(**{src: nx, dst: nf}), bias=zeros_param(**{dst: nf}))
