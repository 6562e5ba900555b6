"""A convolution along a sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, param, static, zeros_param


@module
class Conv:
    """x (B, T, C) -> (B, ceil(T / stride), D), with zeros around; weight (D, C, kernel)."""

    weight: Any
    bias: Any
    stride: static[int] = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        around = (self.weight.shape[2] - 1) // 2
        weight = jnp.asarray(self.weight, x.dtype)
        y = jax.lax.conv_general_dilated(
            x, weight, (self.stride,), [(around, around)], dimension_numbers=("NWC", "OIW", "NWC")
        )
        return y + self.bias.astype(y.dtype)


def conv(channels: int, embed: int, kernel: int, stride: int = 1) -> Conv:
    return Conv(
        weight=param(embed=embed, features=channels, kernel=kernel),
        bias=zeros_param(embed=embed),
        stride=stride,
    )
