"""A stack of layers with what stands before and after it, and the encoders that are one."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.linear import Embedding, PositionTable
from flaxen.layers.norm import Identity
from flaxen.layers.positions import WavePositions
from flaxen.layers.relative_bias import PastBias, RelativeBias
from flaxen.layers.runtime import Runtime
from flaxen.models.fold import run, unfold
from flaxen.models.inputs import array, fitting, token_ids


@module
class Tower:
    """embed_positions: there when positions are added; embed_norm: over the first states;
    position_bias: added to the scores of layers that look at it; dropout: of the first states;
    last_dropout: of the last ones.
    """

    layers: Any
    embed_positions: PositionTable | WavePositions | None = None
    embed_norm: Any = Identity()
    position_bias: RelativeBias | PastBias | None = None
    norm: Any = Identity()
    dropout: static[float] = 0.0
    last_dropout: static[float] = 0.0

    def climb(
        self, x: jax.Array, ctx: Context, caches: Any = None, collect: bool = False
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        """Embeddings (B, T, D) -> states (B, T, D), caches, and if `collect` those before and after
        each layer.
        """
        with ctx.runtime.products():
            if self.embed_positions is not None:
                x = x + self.embed_positions(ctx.positions)
            x = self.embed_norm(ctx.runtime.computing(x))
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
            first = x = dropout(x, self.dropout, ctx.of_layer(len(self.layers)).dropout_key)
            x, caches, states = run(self.layers, x, ctx, caches, collect)
            key = ctx.of_layer(len(self.layers) + 1).dropout_key
            x = dropout(self.norm(x), self.last_dropout, key)
        return x, caches, (first, *states[:-1], x) if collect else ()

    def attentions(self, states: tuple[jax.Array, ...], ctx: Context) -> tuple[Any, ...]:
        """What each layer looks at, computed again from what it was given."""
        layers = unfold(self.layers, lambda x, i: x[i])
        with ctx.runtime.products():
            given = enumerate(zip(layers, states[:-1], strict=True))
            return tuple(layer.attentions(x, ctx.of_layer(i)) for i, (layer, x) in given)

    def check_length(self, name: str, length: int) -> None:
        """
        Raises:
            InputError: for more tokens than there are positions.
        """
        most = self.longest()
        if most is not None and length > most:
            raise InputError(f"{name} have {length} tokens; this model has positions for {most}.")

    def longest(self) -> int | None:
        """How many positions there are; None if any number."""
        table = self.embed_positions
        if table is None or isinstance(table, WavePositions):
            return None if table is None else table.count
        return table.weight.shape[0] - getattr(table, "offset", 0)


class Source:
    """What every encoder offers: the inputs it takes, checked and embedded."""

    inputs: ClassVar[tuple[str, ...]]

    def checked(self, table: Embedding, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Its sequence and the mask of that, 0 for padding, or None.

        Raises:
            InputError: for what cannot be such.
        """
        raise NotImplementedError

    def embedded(self, table: Embedding, sequence: jax.Array) -> jax.Array:
        """(B, S, D)."""
        raise NotImplementedError

    def example(self, shape: tuple[int, int]) -> Any:
        """A sequence as shapes, of so many rows, and tokens if their number is free."""
        raise NotImplementedError

    def ties(self) -> dict[str, str]:
        """As `Skeleton.ties`."""
        return {}


@module
class TextEncoder(Source, Tower):
    """Every token sees all others; their table is the decoder's too."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")

    def checked(self, table: Embedding, inputs: dict[str, Any]) -> tuple[Any, Any]:
        ids = token_ids(inputs["input_ids"], table.vocab_size)
        self.check_length("input_ids", ids.shape[1])
        return ids, fitting(ids.shape, "attention_mask", inputs.get("attention_mask"))

    def embedded(self, table: Embedding, sequence: jax.Array) -> jax.Array:
        return table(sequence)

    def example(self, shape: tuple[int, int]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def ties(self) -> dict[str, str]:
        sides = ("encoder", "decoder")
        return {f"{side}.embed_tokens.weight": "embed_tokens.weight" for side in sides}


def encoder_context(
    tower: Tower,
    shape: tuple[int, int],
    keep: jax.Array | None,
    runtime: Runtime,
    dropout_key: jax.Array | None = None,
) -> Context:
    """What an encoder's layers look at. shape: (B, S); keep (B, S) is False for padding."""
    slots = jnp.arange(shape[1], dtype=jnp.int32)
    bias = tower.position_bias
    assert not isinstance(bias, PastBias)
    return Context(
        positions=jnp.broadcast_to(slots, shape),
        scene=Scene(q_slots=slots, k_slots=slots, keep=keep, aligned=True),
        rotary=(),
        dropout_key=dropout_key,
        bias=None if bias is None else bias(shape[1]),
        runtime=runtime,
    )


def features(name: str, x: Any, channels: int, length: int) -> Any:
    """What a front end gives, (B, channels, length).

    Raises:
        InputError: another shape, or no floats.
    """
    x = array(x)
    if x.ndim != 3 or x.shape[1:] != (channels, length) or not np.issubdtype(x.dtype, np.floating):
        raise InputError(
            f"{name} are {x.dtype} of shape {x.shape}; expected floats of shape (batch, "
            f"{channels}, {length})."
        )
    return x
