"""What a decoder is given to learn labels from: the same, moved to the right."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from flaxen.core.errors import ConfigError
from flaxen.layers.cross_entropy import IGNORED


@dataclasses.dataclass(frozen=True)
class Shift:
    """What the decoder is given to predict labels: `start`, then all labels but the last, `pad`
    for those that do not count.
    """

    start: int | None
    pad: int | None

    def __call__(self, labels: jax.Array) -> jax.Array:
        """labels (B, T) -> (B, T)."""
        if self.start is None or self.pad is None:
            raise ConfigError(
                "Shifting labels needs decoder_start_token_id and pad_token_id in config.json; "
                f"found {self.start} and {self.pad}. Pass decoder_input_ids."
            )
        labels = jnp.asarray(labels)
        moved = jnp.pad(labels[:, :-1], [(0, 0), (1, 0)], constant_values=self.start)
        return jnp.where(moved == IGNORED, self.pad, moved)

    def alone(self, ids: jax.Array | None) -> jax.Array | None:
        """What the decoder is given when nothing is said about it; None if that is no question."""
        return None


class SelfShift(Shift):
    """BART's: without any labels, the input itself is to be said."""

    def alone(self, ids: jax.Array | None) -> jax.Array | None:
        return None if ids is None else self(ids)


class LanguageShift(SelfShift):
    """mBART's: the last real token, which names the language, comes first."""

    def __call__(self, labels: jax.Array) -> jax.Array:
        if self.pad is None:
            raise ConfigError("Shifting labels needs pad_token_id in config.json.")
        labels = jnp.where(labels == IGNORED, self.pad, jnp.asarray(labels))
        last = (labels != self.pad).sum(1, keepdims=True) - 1
        first = jnp.take_along_axis(labels, last, axis=1)
        return jnp.concatenate([first, labels[:, :-1]], axis=1)
