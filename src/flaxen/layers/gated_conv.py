"""LFM 2's short convolution: gated before and after, with the last few tokens as all its memory."""

from __future__ import annotations

import jax

from flaxen.cache import Order, Recurrent, states
from flaxen.core.tree import module
from flaxen.layers.conv import ShortConv, short_conv
from flaxen.layers.linear import Linear, linear
from flaxen.layers.recurrence import Line, Mixer, Past
from flaxen.layers.runtime import Runtime


@module
class GatedConv(Mixer):
    """out(c * conv(b * x)), where b, c and x are projections of the input."""

    in_b: Linear
    in_c: Linear
    in_x: Linear
    conv: ShortConv
    out_proj: Linear

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        old = None if past is None else past[0][0]
        inner = runtime.constrain(self.in_b(x) * self.in_x(x), "batch", "tokens", "mlp")
        y, new = self.conv(inner, line, old)
        return self.out_proj(self.in_c(x) * y), ((new,), None)

    def cache(self, order: Order) -> Recurrent:
        """The shapes of what this layer remembers."""
        return states(order, [self.conv.memory])


def gated_conv(embed: int, kernel: int, *, bias: bool = False) -> GatedConv:
    """By sizes; its channels are cut as those of a feed-forward network are."""
    D, F = {"embed": embed}, {"mlp": embed}
    return GatedConv(
        in_b=linear(D, F, bias=bias),
        in_c=linear(D, F, bias=bias),
        in_x=linear(D, F, bias=bias),
        conv=short_conv(kernel, F, bias=bias),
        out_proj=linear(F, D, bias=bias),
    )
