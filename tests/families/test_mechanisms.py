"""Every family under every attention mechanism that takes its calls: logits under padding, packing
by positions, and past every window.
"""

from __future__ import annotations

import dataclasses

import golden
import jax
import numpy as np
import pytest
import tiny

from flaxen.attention import AttentionSettings
from flaxen.models.causal import forward

MECHANISMS = ["vanilla", "sdpa", "blockwise"]
CASES = ["llama", "mistral", "gemma3_text", "gpt2", "phi3", "bloom"]
"""Grouped heads, windows, both kinds of layers, heads that are not grouped, long prompts, ALiBi."""
LOGITS = 5e-5


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", CASES)
def test_logits_under_padding_and_past_every_window(name, mechanism):
    model, x = tiny.model(name), golden.case(name).arrays
    runtime = dataclasses.replace(model.runtime, attention=AttentionSettings(mechanism))

    @jax.jit
    def run(module):
        padded = forward(module, x["input_ids"], x["attention_mask"], runtime=runtime)
        return padded.logits, forward(module, x["long_input_ids"], runtime=runtime).logits

    padded, long = run(model.module)
    real = x["attention_mask"] == 1
    np.testing.assert_allclose(padded[real], x["logits"][real], atol=LOGITS)
    np.testing.assert_allclose(long, x["long_logits"], atol=LOGITS)
