"""Every token predicts the next: texts, chats, prompts and completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.layers.context import Context
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import objective, whole_context
from flaxen.models.skeleton import only_generating
from flaxen.train.data.batches import Batches, make_batches
from flaxen.train.data.examples import tokenise
from flaxen.train.data.parts import Part
from flaxen.train.data.records import Record
from flaxen.train.data.stream import Stream
from flaxen.train.objectives.objective import Batch, Metrics, Objective


class Causal(Objective):
    """-log p of each target. Which tokens are targets, the records say."""

    likelihood = True
    reads = ("train_on", "overlong", "label_smoothing", "z_loss", "neftune_alpha")

    def check(self, module: Any) -> None:
        only_generating(module, "be trained on text by this loop")

    def source(self, tok: Any, records: Iterable[Record], accumulation: int) -> Batches:
        config = self.config
        examples = tokenise(
            tok,
            records,
            config.seq_len,
            train_on=config.train_on,
            overlong=config.overlong,
            cache=config.token_cache,
            progress=config.progress,
        )
        return make_batches(
            examples,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            accumulation=accumulation,
            seed=config.seed,
            packing=config.packing,
            by_length=config.group_by_length,
        )

    def stream(self, tok: Any, parts: Sequence[Part], accumulation: int) -> Stream:
        return Stream(tok, tuple(parts), self.config, accumulation, self.kinds)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["targets"] != IGNORED).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        ids, key, config = batch["ids"], batch.get("dropout_keys"), self.config
        ctx = context_of(model, batch, runtime)
        if key is None:  # evaluation: the plain likelihood
            return model.loss(ids, batch["targets"], ctx)[0], {}
        noise = None
        if config.neftune_alpha:
            noise = neftune(
                key, (*ids.shape, model.embed_tokens.weight.shape[1]), config.neftune_alpha
            )
        terms = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss}
        return objective(model, ids, batch["targets"], ctx, noise, _real(batch), **terms)[0], {}


def _real(batch: Batch) -> jax.Array:
    """Which tokens are of documents and not padding, (B, T): those of a row without segments reach
    up to what its last target stands for.
    """
    if "segments" in batch:
        return batch["segments"] > 0
    left = jnp.cumsum((batch["targets"] != IGNORED)[:, ::-1], 1)[:, ::-1] > 0
    return left | jnp.pad(left[:, :-1], [(0, 0), (1, 0)])


def context_of(model: Any, batch: Batch, runtime: Runtime, *, training: bool = True) -> Context:
    """What the layers look at, for rows of `ids` that may be packed; nothing is dropped unless
    `training`.
    """
    return whole_context(
        model,
        batch["ids"].shape,
        runtime,
        position_ids=batch.get("positions"),
        segment_ids=batch.get("segments"),
        dropout_key=batch.get("dropout_keys") if training else None,
    )


def neftune(key: jax.Array, shape: tuple[int, int, int], alpha: float) -> jax.Array:
    """Noise for embeddings (B, T, D): uniform, its norm about alpha / sqrt(3)
    (https://arxiv.org/abs/2310.05914).
    """
    size = alpha / math.sqrt(shape[1] * shape[2])
    return jax.random.uniform(jax.random.fold_in(key, NOISE), shape, minval=-size, maxval=size)


NOISE = 0x4E46
"""Keeps its numbers apart from those of dropout."""
