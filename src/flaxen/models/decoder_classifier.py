"""A decoder whose last token says what a row is: Transformers' `...ForSequenceClassification`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.linear import Linear
from flaxen.layers.pooling import LastToken
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import whole_context
from flaxen.models.classifiers import SequenceHead
from flaxen.models.decoder import Decoder
from flaxen.models.fold import attentions_of
from flaxen.models.heads import Last
from flaxen.models.inputs import fitting, token_ids
from flaxen.models.outputs import LogitsOutput
from flaxen.models.skeleton import How


@module
class DecoderClassifier(Decoder):
    """score: makes labels of the state of a row's last token. That is the last one that is not
    `pad`, as in Transformers; without a `pad` the last one that a mask keeps. problem: as in
    `SequenceHead`.
    """

    score: Linear
    pad: static[int | None] = None
    problem: static[str | None] = None

    generates: ClassVar[bool] = False

    def kind(self) -> str:
        return f"a decoder for {SequenceHead.name}"

    def takes(self) -> tuple[str, ...]:
        return ("input_ids", "attention_mask", "position_ids", "labels")

    def call(self, how: How, **inputs: Any) -> LogitsOutput:
        """Scores of each row's labels, (B, L)."""
        return forward(
            self,
            *self._checked(**inputs),
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def loss_alone(self, how: How, **inputs: Any) -> jax.Array:
        loss = self.call(how, **inputs).loss
        assert loss is not None
        return loss

    def _checked(
        self,
        *,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        **targets: Any,
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        ids = token_ids(input_ids, self.embed_tokens.vocab_size)
        fit = partial(fitting, ids.shape)
        positions = fit("position_ids", position_ids)
        checked = self.head().check(ids.shape, targets)
        return ids, fit("attention_mask", attention_mask), positions, checked

    def head(self) -> SequenceHead:
        """What is made of the last states."""
        return SequenceHead(pool=LastToken(), out_proj=self.score, problem=self.problem)

    def row_scores(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        return forward(self, ids, mask, None, {}, dropout_key, runtime=runtime).logits

    def ties(self) -> dict[str, str]:
        return {}

    def labels(self) -> int:
        return self.score.weight.shape[0]

    def heads(self) -> tuple[str, ...]:
        return ("score",)

    def lacks(self) -> tuple[str, ...]:
        return ("lm_head",)


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions"))
def forward(
    decoder: DecoderClassifier,
    ids: jax.Array,
    mask: jax.Array | None,
    positions: jax.Array | None,
    targets: dict[str, jax.Array],
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
) -> LogitsOutput:
    """Scores of labels, and the loss if there are labels."""
    ctx = whole_context(decoder, ids.shape, runtime, mask, positions, dropout_key=dropout_key)
    x, _, states = decoder.hidden(ids, ctx, None, hidden_states or attentions)
    keep = jnp.ones(ids.shape, bool) if mask is None else mask.astype(bool)
    if decoder.pad is not None:
        keep = ids != decoder.pad
        # Of nothing but padding, the first.
        keep = keep.at[:, 0].set(keep[:, 0] | ~keep.any(1))
    with runtime.products():
        out = decoder.head()(Last(x, keep, None, ids.shape[:1]))
    return dataclasses.replace(
        out,
        loss=decoder.head().loss(out, targets) if targets else None,
        hidden_states=states if hidden_states else None,
        attentions=attentions_of(decoder.layers, states, ctx) if attentions else None,
    )
