"""The encoder of an encoder-decoder by itself: a text in, states of its tokens out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from flaxen.core.tree import module
from flaxen.layers.linear import Embedding
from flaxen.layers.runtime import Runtime
from flaxen.models.outputs import EncoderOutput
from flaxen.models.skeleton import How, Skeleton
from flaxen.models.tower import TextEncoder, encoder_context


@module
class EncoderAlone(Skeleton):
    """embed_tokens is the table that the encoder shares with nobody here."""

    embed_tokens: Embedding
    encoder: TextEncoder

    def kind(self) -> str:
        return "the encoder of an encoder-decoder"

    def bare(self) -> bool:
        return True

    def takes(self) -> tuple[str, ...]:
        return self.encoder.inputs

    def ties(self) -> dict[str, str]:
        return {"encoder.embed_tokens.weight": "embed_tokens.weight"}

    def longest(self) -> int | None:
        return self.encoder.longest()

    def call(self, how: How, **inputs: Any) -> EncoderOutput:
        """States of token ids (B, T)."""
        ids, mask = self.encoder.checked(self.embed_tokens, inputs)
        return forward(
            self,
            ids,
            mask,
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        return forward(self, ids, mask, dropout_key, runtime=runtime).last_hidden_state


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions"))
def forward(
    model: EncoderAlone,
    ids: jax.Array,
    mask: jax.Array | None,
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
) -> EncoderOutput:
    """What the encoder makes of ids, with what is asked for on the way."""
    encoder, keep = model.encoder, None if mask is None else mask.astype(bool)
    ctx = encoder_context(encoder, (ids.shape[0], ids.shape[1]), keep, runtime, dropout_key)
    with runtime.products():
        x = encoder.embedded(model.embed_tokens, ids)
    x, _, states = encoder.climb(x, ctx, None, hidden_states or attentions)
    return EncoderOutput(
        last_hidden_state=x,
        hidden_states=states if hidden_states else None,
        attentions=encoder.attentions(states, ctx) if attentions else None,
    )
