"""Tokens that were hidden, from both sides.

Source: https://arxiv.org/abs/1810.04805, section 3.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.encoder import Encoder, loss_of
from flaxen.models.heads import MaskedLMHead
from flaxen.train.data.rows import RowBatches, at_least_one, filled, row_batches
from flaxen.train.objectives.objective import Batch, Metrics, Objective


class Masked(Objective):
    """-log p of each hidden token: `mlm_probability` of all that are not special. Of these 80 %
    read as the mask, 10 % as any token and 10 % as they are.
    """

    kinds: ClassVar = ("text",)
    reads: ClassVar = ("mlm_probability",)
    likelihood: ClassVar[bool] = True
    vocab: int | None = None
    """Rows of the model's table, which may be fewer than the tokenizer has tokens."""

    def check(self, module: Any) -> None:
        if not isinstance(module, Encoder) or type(module.head) is not MaskedLMHead:
            raise InputError(
                f"This model is {module.kind()}; hidden tokens are found by an encoder for masked "
                "language modeling. Load it with config={'architectures': ['...ForMaskedLM']}."
            )
        self.vocab = module.embed_tokens.vocab_size

    def source(self, tok: Any, records: Any, accumulation: int) -> HiddenTokens:
        if tok.mask_token_id is None:
            raise InputError("The tokenizer has no mask token, which stands for what is hidden.")
        T, rows = self.config.seq_len, []
        for record in records:
            pieces = tok(
                record.fields["text"],
                truncation=True,
                max_length=T,
                return_overflowing_tokens=True,
                return_special_tokens_mask=True,
                verbose=False,
            )
            for ids, special in zip(
                pieces["input_ids"], pieces["special_tokens_mask"], strict=True
            ):
                plain = 1 - np.asarray(special, np.int32)
                if plain.any():
                    ids = np.asarray(ids, np.int32)
                    rows.append({"ids": ids, "mask": np.ones_like(ids), "plain": plain})
        if not rows:
            raise InputError("None of the texts has a token that is not special.")
        blank = {key: filled(T, 0) for key in ("ids", "mask", "plain")}
        whole = row_batches(rows, blank, self.config, accumulation)
        vocab = min(len(tok), self.vocab or len(tok))
        return HiddenTokens(whole, self.config.mlm_probability, tok.mask_token_id, vocab)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["targets"] != IGNORED).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        targets = {"labels": batch["targets"]}
        ids, mask, key = batch["ids"], at_least_one(batch["mask"]), batch.get("dropout_keys")
        mean = loss_of(model, ids, mask, None, None, targets, key, runtime=runtime)
        return mean * jnp.maximum(self.weight(batch), 1), {}


@dataclasses.dataclass(frozen=True)
class HiddenTokens:
    """Batches in which tokens are hidden: others in each step, as its number and the seed say."""

    whole: RowBatches
    share: float
    mask_token: int
    vocab: int

    @property
    def per_epoch(self) -> int:
        return self.whole.per_epoch

    def fingerprint(self) -> str:
        return self.whole.fingerprint()

    def mixed(self, others: Sequence[HiddenTokens], weights: Sequence[float]) -> HiddenTokens:
        """One source of this and others, by weight."""
        whole = self.whole.mixed([other.whole for other in others], weights)
        return dataclasses.replace(self, whole=whole)

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """ids, mask, and targets where a token is hidden: int32 (accumulation, B, T)."""
        batch = self.whole.batch_at(step)
        plain, ids = batch.pop("plain") > 0, batch["ids"]
        # Not the key of an epoch's order, whose second number is small.
        key = np.array([self.whole.seed, 2**63 + step], np.uint64)
        draw = np.random.Generator(np.random.Philox(key=key))
        which, how = draw.random(ids.shape), draw.random(ids.shape)
        others = draw.integers(0, self.vocab, ids.shape, np.int32)
        hidden = plain & (which < self.share)
        read = np.where(how < 0.8, self.mask_token, np.where(how < 0.9, others, ids))
        targets = np.where(hidden, ids, IGNORED).astype(np.int32)
        return batch | {"ids": np.where(hidden, read, ids).astype(np.int32), "targets": targets}
