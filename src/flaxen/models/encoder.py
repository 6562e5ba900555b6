"""The encoder skeleton: embed, layers that see both ways, and a head."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static, walk
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.linear import Embedding, PositionTable
from flaxen.layers.norm import Identity
from flaxen.layers.relative_bias import RelativeBias
from flaxen.layers.runtime import Runtime
from flaxen.models.encoder_positions import CountAfter, CountSlots
from flaxen.models.fold import attentions_of, run
from flaxen.models.heads import Bare, Head, Last
from flaxen.models.inputs import array, fitting, token_ids
from flaxen.models.skeleton import How, Skeleton


@module
class Encoder(Skeleton):
    """Every token sees all others. embed_positions: there when positions are learned, counted by
    `count`; embed_types: which text of several a token is of; embed_norm: over their sum;
    position_bias: added to the scores of layers that look at it; pad: the token that stands for
    none and learns nothing where it is given, as in torch; dropout: of the embeddings.
    """

    embed_tokens: Embedding
    layers: Any
    head: Head = Bare()
    embed_positions: PositionTable | None = None
    embed_types: Embedding | None = None
    embed_norm: Any = Identity()
    position_bias: RelativeBias | None = None
    norm: Any = Identity()
    count: static[CountSlots | CountAfter] = CountSlots()
    pad: static[int | None] = None
    dropout: static[float] = 0.0

    def kind(self) -> str:
        return f"an encoder {f'for {self.head.name}' if self.head.name else 'without a head'}"

    def takes(self) -> tuple[str, ...]:
        types = () if self.embed_types is None else ("token_type_ids",)
        return ("input_ids", "attention_mask", *types, "position_ids", *self.head.targets)

    def ties(self) -> dict[str, str]:
        return self.head.ties()

    def call(self, how: How, **inputs: Any) -> Any:
        """What the head makes of token ids (B, T), or (B, C, T) of C choices."""
        return forward(
            self,
            *self._checked(**inputs),
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def loss_alone(self, how: How, **inputs: Any) -> jax.Array:
        return loss_of(self, *self._checked(**inputs), how.dropout_key, runtime=how.runtime)

    def _checked(
        self,
        *,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        **targets: Any,
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ids = array(input_ids)
        if ids.ndim != self.head.ids:
            raise InputError(
                f"input_ids have shape {ids.shape}; {self.kind()} takes "
                f"{'(batch, choices, length)' if self.head.ids == 3 else '(batch, length)'}."
            )
        token_ids(ids.reshape(-1, ids.shape[-1]) if ids.size else ids, self.embed_tokens.vocab_size)
        fit = partial(fitting, ids.shape)
        self.check_length(ids.shape[-1])
        return (
            ids,
            fit("attention_mask", attention_mask),
            self._types(fit("token_type_ids", token_type_ids)),
            self._placed(fit("position_ids", position_ids)),
            self.head.check(ids.shape, targets),
        )

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        self.check_length(ids.shape[-1])
        positions = self.count(ids)
        ctx = self.context(positions, mask.astype(bool), runtime, dropout_key)
        return self.hidden(ids, None, ctx)[0]

    @property
    def own_vectors(self) -> bool:
        return self.head.own_vectors

    def text_vectors(self, ids: jax.Array, mask: jax.Array, runtime: Runtime) -> jax.Array:
        seen = None if self.head.whole_rows else mask
        last, _, _ = _run(self, ids, seen, None, None, None, runtime)
        with runtime.products():
            return self.head.vectors(last)

    def row_length(self) -> int | None:
        return self.longest() if self.head.whole_rows else None

    def context(
        self,
        positions: jax.Array,
        keep: jax.Array | None,
        runtime: Runtime,
        dropout_key: jax.Array | None = None,
    ) -> Context:
        """What the layers look at. positions (B, T); keep (B, T) is False for padding."""
        slots = jnp.arange(positions.shape[1], dtype=jnp.int32)
        attentions = (m for m in walk(self.layers) if isinstance(m, Attention))
        ropes = tuple(dict.fromkeys(a.rope for a in attentions if a.rope is not None))
        return Context(
            positions=positions,
            scene=Scene(q_slots=slots, k_slots=slots, keep=keep, aligned=True),
            rotary=tuple(rope.tables(positions) for rope in ropes),
            dropout_key=dropout_key,
            bias=None if self.position_bias is None else self.position_bias(len(slots)),
            ropes=ropes,
            runtime=runtime,
        )

    def hidden(
        self, ids: jax.Array, types: jax.Array | None, ctx: Context, collect: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """ids (B, T) -> states (B, T, D), and if `collect` those before and after each layer."""
        with ctx.runtime.products():
            first = x = self.embedded(ids, types, ctx)
            x, _, states = run(self.layers, x, ctx, None, collect)
            x = self.norm(x)
        return x, (first, *states[:-1], x) if collect else ()

    def embedded(self, ids: jax.Array, types: jax.Array | None, ctx: Context) -> jax.Array:
        """What the first layer is given, in the dtype that is computed in: (B, T, D)."""
        x = _fixed(self.embed_tokens(ids), None if self.pad is None else ids == self.pad)
        if self.embed_types is not None:
            x = x + self.embed_types(jnp.zeros_like(ids) if types is None else types)
        if self.embed_positions is not None:
            still = self.count.unlearned(ctx.positions)
            x = x + _fixed(self.embed_positions(ctx.positions), still)
        x = self.embed_norm(ctx.runtime.computing(x))
        x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return dropout(x, self.dropout, ctx.of_layer(len(self.layers)).dropout_key)

    def row_scores(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        return forward(self, ids, mask, None, None, {}, dropout_key, runtime=runtime).logits

    def labels(self) -> int | None:
        return self.head.labels()

    def heads(self) -> tuple[str, ...]:
        return () if self.labels() is None else ("head",)

    def bare(self) -> bool:
        return isinstance(self.head, Bare)

    def longest(self) -> int | None:
        if self.embed_positions is None:
            return None
        return self.embed_positions.weight.shape[0] - self.count.rows(0)

    def check_length(self, length: int) -> None:
        """
        Raises:
            InputError: more tokens than there are positions.
        """
        most = self.longest()
        if most is not None and length > most:
            raise InputError(f"The rows have {length} tokens; this model has positions for {most}.")

    def _placed(self, positions: Any) -> Any:
        if self.embed_positions is not None and isinstance(positions, np.ndarray):
            most = self.embed_positions.weight.shape[0]
            if positions.min() < 0 or positions.max() >= most:
                raise InputError(
                    f"position_ids lie between {positions.min()} and {positions.max()}; this model "
                    f"has positions 0 to {most - 1}."
                )
        return positions

    def _types(self, types: Any) -> Any:
        if types is not None and self.embed_types is not None and not isinstance(types, jax.Array):
            most = self.embed_types.vocab_size
            if types.min() < 0 or types.max() >= most:
                raise InputError(f"token_type_ids hold {types.max()}; expected 0 to {most - 1}.")
        return types


def _fixed(x: jax.Array, still: jax.Array | None) -> jax.Array:
    """x (B, T, D), through which no gradient passes where `still` (B, T)."""
    return x if still is None else jnp.where(still[..., None], jax.lax.stop_gradient(x), x)


def _run(
    encoder: Encoder,
    ids: jax.Array,
    mask: jax.Array | None,
    types: jax.Array | None,
    positions: jax.Array | None,
    dropout_key: jax.Array | None,
    runtime: Runtime,
    collect: bool = False,
) -> tuple[Last, tuple[jax.Array, ...], Context]:
    """What the head is given; (B, C, T) are B * C rows."""
    rows, ids = ids.shape[:-1], ids.reshape(-1, ids.shape[-1])
    mask, types, positions = (
        None if x is None else x.reshape(ids.shape) for x in (mask, types, positions)
    )
    keep = None if mask is None else mask.astype(bool)
    placed = encoder.count(ids) if positions is None else positions
    ctx = encoder.context(placed, keep, runtime, dropout_key)
    x, states = encoder.hidden(ids, types, ctx, collect)
    key = ctx.of_layer(len(encoder.layers) + 1).dropout_key
    kept = jnp.ones(ids.shape, bool) if keep is None else keep
    last = Last(x, kept, encoder.embed_tokens, rows, key, ids, runtime.placement)
    return last, states, ctx


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions"))
def forward(
    encoder: Encoder,
    ids: jax.Array,
    mask: jax.Array | None,
    types: jax.Array | None,
    positions: jax.Array | None,
    targets: dict[str, jax.Array],
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
) -> Any:
    """The head's output, and its loss if there are targets enough."""
    collect = hidden_states or attentions
    last, states, ctx = _run(encoder, ids, mask, types, positions, dropout_key, runtime, collect)
    with runtime.products():
        out = encoder.head(last)
    return dataclasses.replace(
        out,
        loss=encoder.head.loss(out, targets) if targets else None,
        hidden_states=states if hidden_states else None,
        attentions=attentions_of(encoder.layers, states, ctx) if attentions else None,
    )


@partial(jax.jit, static_argnames=("runtime",))
def loss_of(
    encoder: Encoder,
    ids: jax.Array,
    mask: jax.Array | None,
    types: jax.Array | None,
    positions: jax.Array | None,
    targets: dict[str, jax.Array],
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
) -> jax.Array:
    """The loss of `forward`, by the way of the head that takes the least memory."""
    last, _, _ = _run(encoder, ids, mask, types, positions, dropout_key, runtime)
    with runtime.products():
        return encoder.head.loss_alone(last, targets)
