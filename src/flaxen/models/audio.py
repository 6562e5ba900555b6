"""Whisper's encoder: two convolutions over a log-mel spectrogram, then layers, arXiv 2212.04356."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.tree import module
from flaxen.layers.linear import Embedding, PositionTable
from flaxen.layers.strided_conv import Conv
from flaxen.models.tower import Source, Tower, features


@module
class AudioEncoder(Source, Tower):
    """All frames of a piece of audio see each other; silence is no padding."""

    conv1: Conv
    conv2: Conv
    inputs: ClassVar[tuple[str, ...]] = ("input_features", "attention_mask")

    @property
    def length(self) -> int:
        """How many states it makes of a piece of audio."""
        assert isinstance(self.embed_positions, PositionTable)
        return self.embed_positions.weight.shape[0]

    @property
    def frames(self) -> int:
        """How many a piece of audio has: no more, no less."""
        return self.length * self.conv1.stride * self.conv2.stride

    def checked(self, table: Embedding, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Transformers takes an attention_mask too, and looks at no padding either."""
        mels = self.conv1.weight.shape[1]
        return features("input_features", inputs["input_features"], mels, self.frames), None

    def embedded(self, table: Embedding, sequence: jax.Array) -> jax.Array:
        """sequence: (B, mels, frames)."""
        x = jnp.swapaxes(sequence, 1, 2).astype(self.conv1.weight.dtype)
        for conv in (self.conv1, self.conv2):
            x = jax.nn.gelu(conv(x), approximate=False)
        return x

    def example(self, shape: tuple[int, int]) -> Any:
        mels = self.conv1.weight.shape[1]
        return jax.ShapeDtypeStruct((shape[0], mels, self.frames), jnp.float32)
