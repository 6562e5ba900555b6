"""Vectors of texts that belong together, apart from all others: InfoNCE over a batch.

Sources: https://arxiv.org/abs/1807.03748; in-batch negatives, https://arxiv.org/abs/1705.00652.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.embed.recipe import Recipe, recipe_of
from flaxen.layers.runtime import Runtime
from flaxen.models.decoder import Decoder
from flaxen.models.encoder import Encoder
from flaxen.train.data.kinds import negatives
from flaxen.train.data.rows import RowBatches, at_least_one, filled, row_batches
from flaxen.train.objectives.classification import text_ids
from flaxen.train.objectives.objective import Batch, Metrics, Objective


class Embedding(Objective):
    """-log softmax, over all texts of a micro-batch, of the similarity of a query and its text: the
    cosine of their vectors over `embedding_temperature`.

    Vectors are what `model.embed` makes of texts, without a prompt. Hard negatives are among the
    texts. With `embedding_symmetric` it is the mean with the loss of finding each text's query.
    """

    kinds: ClassVar = ("pair",)
    reads: ClassVar = ("embedding_temperature", "embedding_symmetric")
    recipe: Recipe = Recipe()

    def check(self, module: Any) -> None:
        if not isinstance(module, Decoder | Encoder):
            raise InputError(f"This model is {module.kind()}, which makes no vectors of texts.")

    def begin(self, model: Any, reference: Any) -> None:
        folder = model.origin.folder
        self.recipe = Recipe() if folder is None else recipe_of(folder)

    def source(self, tok: Any, records: Any, accumulation: int) -> RowBatches:
        T, rows, most = self.config.seq_len, [], 0
        if self.recipe.max_length is not None:
            T = min(T, self.recipe.max_length)
        for record in records:
            fields = record.fields
            query = fields["query"] if "query" in fields else fields["anchor"]
            texts = [query, fields["positive"], *negatives(fields)]
            texts = [text.lower() if self.recipe.lower else text for text in texts]
            ids = [text_ids(tok, text, T) for text in texts]
            if not all(map(len, ids)):
                raise InputError(f"{record.where}: a text without a token has no vector.")
            most = max(most, len(ids))
            row = {}
            for i, one in enumerate(ids):
                row |= {f"ids_{i}": one, f"mask_{i}": np.ones_like(one)}
            rows.append(row)
        blank = {f"{key}_{i}": filled(T, 0) for i in range(most) for key in ("ids", "mask")}
        return row_batches(rows, blank, self.config, accumulation)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["mask_0"] > 0).any(-1).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        sides = sum(key.startswith("ids_") for key in batch)
        stacked = lambda key: jnp.stack([batch[f"{key}_{i}"] for i in range(sides)], axis=1)
        ids, mask = stacked("ids"), stacked("mask")
        B, _, T = ids.shape
        flat = at_least_one(mask.reshape(-1, T))
        x = model.features(ids.reshape(-1, T), flat, runtime, batch.get("dropout_keys"))
        x = x.astype(jnp.float32)
        for step in (lambda x: self.recipe.pool(x, flat.astype(bool)), *self.recipe.steps):
            x = step(x)
        vectors, real = x.reshape(B, sides, -1), (mask > 0).any(-1)
        return contrasted(
            unit(vectors), real, self.config.embedding_temperature, self.config.embedding_symmetric
        )


def unit(x: jax.Array) -> jax.Array:
    """Of length 1, or 0 where they are; also derived there."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def contrasted(
    vectors: jax.Array, real: jax.Array, temperature: float, symmetric: bool
) -> tuple[jax.Array, Metrics]:
    """vectors (B, S, E): a query, its text, negatives; real (B, S) says which are there. The sum of
    the losses of all queries, and how often the right text is the nearest.
    """
    B, S, E = vectors.shape
    # Of all rows the texts, then of all rows the first negatives, ...: row i's own is column i.
    texts = jnp.swapaxes(vectors[:, 1:], 0, 1).reshape((S - 1) * B, E)
    there = jnp.swapaxes(real[:, 1:], 0, 1).reshape(-1)
    alike = vectors[:, 0] @ texts.T / temperature
    own, counted = jnp.arange(B), real[:, 0]

    def nll(scores: jax.Array, columns: jax.Array) -> jax.Array:
        scores = jnp.where(columns, scores, -jnp.inf)
        found = jax.nn.logsumexp(scores, axis=-1, where=columns) - scores[own, own]
        return jnp.where(counted, found, 0)

    # A row that is not there is compared with itself, so that nothing is infinite.
    columns = there[None, :] | (jnp.arange((S - 1) * B)[None, :] == own[:, None])
    losses = nll(alike, columns)
    if symmetric:
        queries = counted[None, :] | (own[None, :] == own[:, None])
        losses = (losses + nll(alike[:, :B].T, queries)) / 2
    nearest = jnp.where(columns, alike, -jnp.inf).argmax(-1) == own
    return losses.sum(), {"accuracy": jnp.sum(nearest & counted, dtype=jnp.float32)}
