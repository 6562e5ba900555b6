"""Short causal convolutions: each channel has a filter of its own over the last few tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, param, static, zeros_param
from flaxen.layers.recurrence import Line, wide


@module
class ShortConv:
    """weight: (channels..., kernel), the last tap for the token itself; bias: (channels...).

    channels: the names of these axes.
    """

    weight: Any
    bias: Any = None
    channels: static[tuple[str, ...]]

    def __call__(
        self, x: jax.Array, line: Line, past: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x (B, T, channels...) in the order of the line; past (B, channels..., kernel - 1) the
        inputs before it, else zeros -> the same shape as x, and the inputs before the next token.
        """
        taps, T = self.weight.shape[-1], x.shape[1]
        if past is None:
            past = jnp.zeros((x.shape[0], *x.shape[2:], taps - 1), x.dtype)
        every = jnp.concatenate([jnp.moveaxis(past, -1, 1).astype(x.dtype), x], 1)
        weight = wide(self.weight)
        y = wide(x) * weight[..., -1]
        for back in range(1, taps):
            before = every[:, taps - 1 - back : taps - 1 - back + T]
            y = y + wide(_of_same(before, line, back)) * weight[..., -1 - back]
        y = y if self.bias is None else y + self.bias.astype(y.dtype)
        last = line.count[:, None] + jnp.arange(taps - 1)
        last = last.reshape(*last.shape, *[1] * (x.ndim - 2))
        return y.astype(x.dtype), jnp.moveaxis(jnp.take_along_axis(every, last, 1), 1, -1)

    @property
    def memory(self) -> dict[str, int]:
        """The axes of what it remembers for each row."""
        n = len(self.channels)
        sizes = self.weight.shape[-1 - n : -1]
        return {**dict(zip(self.channels, sizes, strict=True)), "kernel": self.weight.shape[-1] - 1}


def _of_same(before: jax.Array, line: Line, back: int) -> jax.Array:
    """The inputs `back` tokens earlier, zeros where another document stood."""
    if line.documents is None:
        return before
    earlier = jnp.pad(line.documents, [(0, 0), (back, 0)], constant_values=-1)[:, :-back]
    same = earlier == line.documents
    return jnp.where(same.reshape(*same.shape, *[1] * (before.ndim - 2)), before, 0)


def short_conv(kernel: int, channels: dict[str, int], *, bias: bool = False) -> ShortConv:
    """By sizes; the file's filters have an axis of one between channels and kernel."""
    flat = f"({' '.join(channels)})"
    return ShortConv(
        weight=param(f"{flat} 1 kernel", **channels, kernel=kernel),
        bias=zeros_param(flat, **channels) if bias else None,
        channels=tuple(channels),
    )
