"""Short convolutions against loops over taps."""

from __future__ import annotations

import numpy as np
import pytest
import recurrences as plain

from flaxen.layers.gated_conv import gated_conv


def layer(w: plain.Weights, x: np.ndarray) -> np.ndarray:
    into = lambda name: x @ w[f"in_{name}"].T + w.get(f"in_{name}.bias", 0)
    y = plain.convolved(into("b") * into("x"), w["conv"], w.get("conv.bias", 0))
    return (into("c") * y) @ w["out_proj"].T + w.get("out_proj.bias", 0)


@pytest.mark.parametrize(("kernel", "bias"), [(3, False), (5, True), (1, False), (80, True)])
def test_layer(kernel, bias):
    """A filter may be longer than a prompt, or see the token alone."""
    plain.check_layer(plain.filled(gated_conv(6, kernel, bias=bias)), layer, 6)
