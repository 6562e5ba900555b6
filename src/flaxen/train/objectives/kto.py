"""Kahneman-Tversky optimisation: answers that are good or bad, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.skeleton import only_generating
from flaxen.train.data.answers import Answered, answered
from flaxen.train.data.rows import Row, RowBatches, filled, number
from flaxen.train.objectives.objective import Batch, Metrics, Objective
from flaxen.train.objectives.preference import answer_logps


class Kto(Objective):
    """desirable_weight * (1 - sigmoid(beta * (log p / p_ref - kl))) of a good answer,
    undesirable_weight * (1 - sigmoid(beta * (kl - log p / p_ref))) of a bad one.

    kl is how far the model is from its reference: the mean of log p / p_ref over the rows of a
    micro-batch, each prompt with the answer of the row before, and at least 0; no gradient passes.

    Source: https://arxiv.org/abs/2402.01306, equation 7.
    """

    kinds: ClassVar = ("judged",)
    reads: ClassVar = ("beta", "desirable_weight", "undesirable_weight", "reference")
    compares: bool = True

    def check(self, module: Any) -> None:
        only_generating(module, "be trained on answers")

    def source(self, tok: Any, records: Any, accumulation: int) -> RowBatches:
        config, T, rows = self.config, self.config.seq_len, []
        if config.batch_size < 2:
            raise InputError(
                "kto compares the rows of a micro-batch, of which batch_size is 1; use 2 or more."
            )
        for record in records:
            fields = record.fields
            try:
                sides = answered(tok, fields["prompt"], fields["completion"])
            except InputError as error:
                raise InputError(f"{record.where}: {error}") from error
            if (sides.row(T)[1] != IGNORED).any():
                rows.append(_parts(sides, fields["label"]))
        if not rows:
            raise InputError(
                f"None of the {len(records)} answers has a token within seq_len={T} tokens. Use a "
                "longer seq_len."
            )
        blank = {
            "ids": filled(T, 0),
            "targets": filled(T, IGNORED),
            "kl_ids": filled(T, 0),
            "kl_targets": filled(T, IGNORED),
            "good": number(0),
        }
        compose = lambda rows: mismatched(rows, T)
        return RowBatches(rows, blank, config.batch_size, accumulation, config.seed, compose)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["targets"] != IGNORED).any(-1).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        ids, targets = batch["ids"], batch["targets"]
        others, still = (batch["kl_ids"], batch["kl_targets"]), jax.lax.stop_gradient(model)
        logps = answer_logps(model, ids, targets, runtime, batch.get("dropout_keys"))
        ratio = logps - answer_logps(reference, ids, targets, runtime)
        drift = answer_logps(still, *others, runtime) - answer_logps(reference, *others, runtime)
        real = (targets != IGNORED).any(-1).astype(jnp.float32)
        losses, told = judged(ratio, drift, batch["good"] > 0, real, self.config)
        told |= {"logps": logps}
        return jnp.sum(losses * real), {key: jnp.sum(x * real) for key, x in told.items()}


def judged(
    ratio: jax.Array, drift: jax.Array, good: jax.Array, real: jax.Array, config: Any
) -> tuple[jax.Array, Metrics]:
    """The loss of each answer, and what is told of it, (B,). ratio: log p / p_ref; drift: the same
    of answers to other prompts; real: 1 where there is an answer.
    """
    drift = jax.lax.stop_gradient(drift)
    kl = jnp.maximum(jnp.sum(drift * real) / jnp.maximum(jnp.sum(real), 1), 0)
    weight = jnp.where(good, config.desirable_weight, config.undesirable_weight)
    gain = jnp.where(good, 1, -1) * config.beta * (ratio - kl)
    told = {
        "kl": kl,
        "rewards": config.beta * ratio,
        "rewards/accuracies": (gain > 0).astype(jnp.float32),
    }
    return weight * (1 - jax.nn.sigmoid(gain)), told


def _parts(sides: Answered, good: bool) -> dict[str, np.ndarray]:
    ids = lambda values: np.asarray(values, np.int32)
    learned = np.asarray(sides.learned, np.int32)
    return {
        "prompt": ids(sides.prompt),
        "answer": ids(sides.answer),
        "learned": learned,
        "good": number(good),
    }


def mismatched(rows: Sequence[Row], length: int) -> list[Row]:
    """Each prompt with its own answer, and with that of the row before, the first with the last."""
    made = []
    for i, row in enumerate(rows):
        both = {}
        for name, of in (("", row), ("kl_", rows[i - 1])):
            sides = Answered(list(row["prompt"]), list(of["answer"]), list(of["learned"] > 0))
            both[f"{name}ids"], both[f"{name}targets"] = sides.row(length)
        made.append({**both, "good": row["good"]})
    return made
