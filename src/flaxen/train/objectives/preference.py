"""What objectives on pairs of answers share: rows, log-probabilities, what is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import whole_context
from flaxen.models.skeleton import only_generating
from flaxen.train.data.answers import Answered, both_answers
from flaxen.train.data.rows import RowBatches, filled, row_batches
from flaxen.train.objectives.objective import Batch, Metrics, Objective

SIDES = ("chosen", "rejected")


class Pairs(NamedTuple):
    """Of each pair, (B,) in float32: summed log-probabilities of both answers, by the model and by
    the reference (zeros without one); their numbers of tokens, at least 1; and 1 where there is a
    pair.
    """

    chosen: jax.Array
    rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array
    chosen_length: jax.Array
    rejected_length: jax.Array
    real: jax.Array


def answer_logps(
    model: Any, ids: jax.Array, targets: jax.Array, runtime: Runtime, dropout_key: Any = None
) -> jax.Array:
    """(rows, T) -> the summed log-probability of each row's targets, (rows,)."""
    ctx = whole_context(model, ids.shape, runtime, dropout_key=dropout_key)
    return model.logps(ids, targets, ctx)[0].sum(-1)


def together(batch: Batch, kind: str) -> jax.Array:
    """`chosen_...` and `rejected_...` as one batch (2 B, T), pair by pair."""
    # Beside each other, so that each device keeps its own.
    both = jnp.stack([batch[f"chosen_{kind}"], batch[f"rejected_{kind}"]], axis=1)
    return both.reshape(-1, both.shape[-1])


class Preference(Objective):
    """A loss on pairs of answers to one prompt."""

    kinds: ClassVar = ("preference",)
    fills: ClassVar[dict[str, int]] = {"ids": 0, "targets": IGNORED}
    """What a row has of either answer, and what stands where it ends."""

    def check(self, module: Any) -> None:
        only_generating(module, "be trained on answers")

    def source(self, tok: Any, records: Any, accumulation: int) -> RowBatches:
        T, rows = self.config.seq_len, []
        for record in records:
            row: dict[str, Any] = {}
            for name, side in zip(SIDES, both_answers(tok, record), strict=True):
                row |= {f"{name}_{kind}": x for kind, x in self.side(side).items()}
            if self.useful(row):
                rows.append(row)
        if not rows:
            raise InputError(
                f"None of the {len(records)} pairs has something to tell of both answers within "
                f"seq_len={T} tokens. Use a longer seq_len."
            )
        blank = {f"{name}_{kind}": filled(T, x) for name in SIDES for kind, x in self.fills.items()}
        return row_batches(rows, blank, self.config, accumulation)

    def side(self, answer: Answered) -> dict[str, Any]:
        """What a row has of either answer, by the keys of `fills`."""
        return dict(zip(self.fills, answer.row(self.config.seq_len), strict=True))

    def useful(self, row: dict[str, Any]) -> bool:
        """Whether something can be learned of a pair."""
        return all((row[f"{name}_targets"] != IGNORED).any() for name in SIDES)

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["chosen_targets"] != IGNORED).any(-1).sum()

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        ids, targets = together(batch, "ids"), together(batch, "targets")
        logps = answer_logps(model, ids, targets, runtime, batch.get("dropout_keys"))
        before = jnp.zeros_like(logps)
        if reference is not None:
            before = answer_logps(reference, ids, targets, runtime)
        lengths = (targets != IGNORED).sum(-1).astype(jnp.float32)
        pairs = Pairs(
            *(x.reshape(-1, 2)[:, i] for x in (logps, before) for i in (0, 1)),
            *(jnp.maximum(lengths.reshape(-1, 2)[:, i], 1) for i in (0, 1)),
            real=(lengths.reshape(-1, 2)[:, 0] > 0).astype(jnp.float32),
        )
        losses, rewards = self.losses(pairs), self.rewards(pairs)
        return jnp.sum(losses * pairs.real), {
            key: jnp.sum(x * pairs.real) for key, x in _told(pairs, *rewards).items()
        }

    def losses(self, pairs: Pairs) -> jax.Array:
        """The loss of each pair, (B,)."""
        raise NotImplementedError

    def rewards(self, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        """What the model is said to give for either answer, (B,) each; for the log alone."""
        beta = self.config.beta
        return beta * (pairs.chosen - pairs.ref_chosen), beta * (
            pairs.rejected - pairs.ref_rejected
        )


def _told(pairs: Pairs, chosen: jax.Array, rejected: jax.Array) -> Mapping[str, jax.Array]:
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
