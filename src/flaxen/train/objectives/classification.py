"""Rows that have a label, and rows of which one is better: heads that score a whole row."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.train.data.answers import Answered
from flaxen.train.data.rows import RowBatches, at_least_one, filled, number, row_batches
from flaxen.train.objectives.objective import Batch, Metrics, Objective
from flaxen.train.objectives.preference import SIDES, Preference, together


def only_scoring(module: Any, what: str) -> int:
    """How many labels it scores for a row.

    Raises:
        InputError: it scores none, or its padding cannot be told.
    """
    count = module.labels()
    if count is None:
        raise InputError(
            f"This model is {module.kind()}, which cannot {what}. Load it with "
            "task='sequence-classification' (--task) for a head that scores labels."
        )
    if getattr(module, "pad", 0) is None:
        raise InputError(
            "The config has no pad_token_id, by which a row's last token is told. Load the model "
            "with config={'pad_token_id': ...}, the id that your tokenizer pads with."
        )
    return count


def scores(model: Any, ids: Any, mask: Any, runtime: Runtime, batch: Batch) -> jax.Array:
    """(R, T) -> (R, L) in float32; padding gets the id that the model knows it by."""
    pad, mask = getattr(model, "pad", None), at_least_one(mask)
    ids = ids if pad is None else jnp.where(mask > 0, ids, pad)
    found = model.row_scores(ids, mask, runtime, batch.get("dropout_keys"))
    return found.astype(jnp.float32)


class Classification(Objective):
    """-log p of each row's label."""

    kinds: ClassVar = ("labelled",)
    reads: ClassVar = ()
    count: int | None = None

    def check(self, module: Any) -> None:
        self.count = only_scoring(module, "be trained on labels")
        problem = getattr(getattr(module, "head", None), "problem", None)
        problem = getattr(module, "problem", problem)
        if problem not in (None, "single_label_classification"):
            raise InputError(f"problem_type is {problem!r}; classification learns one label a row.")

    def source(self, tok: Any, records: Any, accumulation: int) -> RowBatches:
        T, rows = self.config.seq_len, []
        for record in records:
            text, label = record.fields["text"], record.fields["label"]
            if self.count is not None and label >= self.count:
                raise InputError(
                    f"{record.where}: 'label' is {label}; the model has {self.count}, from 0 on."
                )
            ids = text_ids(tok, text, T)
            if len(ids):
                rows.append({"ids": ids, "mask": np.ones_like(ids), "labels": number(label)})
        if not rows:
            raise InputError("None of the texts has a token.")
        blank = {"ids": filled(T, 0), "mask": filled(T, 0), "labels": number(IGNORED)}
        return row_batches(rows, blank, self.config, accumulation)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["labels"] != IGNORED).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        logits, labels = scores(model, batch["ids"], batch["mask"], runtime, batch), batch["labels"]
        real = labels != IGNORED
        logps = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logps, jnp.where(real, labels, 0)[:, None], -1)[:, 0]
        right = (logits.argmax(-1) == labels) & real
        return -jnp.sum(jnp.where(real, picked, 0)), {"accuracy": jnp.sum(right, dtype=jnp.float32)}


def text_ids(tok: Any, text: str, length: int) -> np.ndarray:
    """Token ids of a text, cut at `length` with the special tokens that close it: int32 (n,)."""
    found = tok(text, truncation=True, max_length=length, verbose=False)["input_ids"]
    return np.asarray(found, np.int32)


class Reward(Preference):
    """-log sigmoid(score of the chosen answer - of the rejected one), and the square of their sum
    times `center_rewards_coefficient`.
    """

    reads: ClassVar = ("center_rewards_coefficient",)
    fills: ClassVar = {"ids": 0, "mask": 0}

    def check(self, module: Any) -> None:
        count = only_scoring(module, "tell how good an answer is")
        if count != 1:
            raise InputError(f"The model scores {count} labels; a reward is one: num_labels=1.")

    def side(self, answer: Answered) -> dict[str, Any]:
        ids = answer.row(self.config.seq_len)[0]
        return {"ids": ids, "mask": np.ones_like(ids)}

    def useful(self, row: dict[str, Any]) -> bool:
        return not np.array_equal(*(row[f"{name}_ids"] for name in SIDES))

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["chosen_mask"] > 0).any(-1).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        ids, mask = together(batch, "ids"), together(batch, "mask")
        found = scores(model, ids, mask, runtime, batch).reshape(-1, 2)
        chosen, rejected = found[:, 0], found[:, 1]
        real = (batch["chosen_mask"] > 0).any(-1).astype(jnp.float32)
        centre = self.config.center_rewards_coefficient * (chosen + rejected) ** 2
        told = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        }
        losses = centre - jax.nn.log_sigmoid(chosen - rejected)
        return jnp.sum(losses * real), {key: jnp.sum(x * real) for key, x in told.items()}
