"""A student that learns what a teacher would say at each token, from the whole distribution.

Sources: https://arxiv.org/abs/1503.02531; generalised Jensen-Shannon divergence,
https://arxiv.org/abs/2306.13649, equation 1.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED, Scoring, widened
from flaxen.layers.row_chunks import in_chunks
from flaxen.layers.row_shards import row_shards
from flaxen.layers.runtime import Runtime
from flaxen.layers.token_logps import log_softmax
from flaxen.train.objectives.causal import Causal, context_of
from flaxen.train.objectives.objective import Batch, Metrics


class How(NamedTuple):
    """What a few rows are compared by: how student and teacher are scored, over how many tokens,
    and the settings.
    """

    student: Scoring
    teacher: Scoring
    vocab: int
    temperature: float
    beta: float


class Distillation(Causal):
    """(1 - distillation_alpha) * divergence + distillation_alpha * -log p of the target.

    The teacher is the `reference` of `train`; its tokens are the student's, and all else may
    differ. The scores of all tokens are never held at once.
    """

    likelihood: ClassVar[bool] = False
    compares: bool = True
    reads: ClassVar = (
        *("train_on", "overlong", "reference"),
        *("distillation_beta", "distillation_temperature", "distillation_alpha"),
    )
    needs: ClassVar = ("reference",)

    def begin(self, model: Any, reference: Any) -> None:
        if reference is None:
            raise InputError("distillation needs a teacher: pass another model as reference=.")
        self.check(reference.module)
        sizes = [x.module.embed_tokens.vocab_size for x in (model, reference)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"The model has {sizes[0]} tokens and its teacher {sizes[1]}; both need the same "
                "tokenizer. `resize_token_embeddings` takes rows away that no token has."
            )

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        config, targets = self.config, batch["targets"]
        states, scorings, heads = [], [], []
        for part, training in ((model, True), (reference, False)):
            ctx = context_of(part, batch, runtime, training=training)
            x = part.hidden(batch["ids"], ctx)[0]
            scoring, (weight, bias) = part.scoring()
            x, weight = widened(x, weight)
            states.append(x)
            scorings.append(scoring)
            heads.append((weight, bias))
        how = How(
            *scorings,
            vocab=model.embed_tokens.vocab_size,
            temperature=config.distillation_temperature,
            beta=config.distillation_beta,
        )
        with runtime.products():
            apart, nll = in_chunks(
                functools.partial(_compared, how),
                states[0],
                heads[0],
                (states[1], targets),
                heads[1],
                shards=row_shards(runtime.placement, targets.shape),
            )
        share = config.distillation_alpha
        apart, nll = apart.sum(), nll.sum()
        told = {"divergence": apart, "cross_entropy": nll}
        return (1 - share) * apart + share * nll, told


def _compared(
    how: How, x: jax.Array, head: Any, still: Any, teacher_head: Any
) -> tuple[jax.Array, jax.Array]:
    """Divergence and -log p of each row's target, (R,) in float32, 0 where there is none."""
    teacher_x, targets = still
    counted = targets != IGNORED
    scored = how.student(x, head)[:, : how.vocab]
    told = how.teacher(teacher_x, teacher_head)[:, : how.vocab]
    apart = divergence(
        log_softmax(scored, how.temperature), log_softmax(told, how.temperature), how.beta
    )
    label = jnp.where(counted, targets, 0)[:, None]
    nll = -jnp.take_along_axis(log_softmax(scored), label, axis=-1)[:, 0]
    return tuple(jnp.where(counted, y, 0).astype(jnp.float32) for y in (apart, nll))  # type: ignore


def divergence(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """Of log-probabilities (..., V): KL(teacher || student) for a beta of 0, KL(student || teacher)
    for 1, between beta * KL(teacher || m) + (1 - beta) * KL(student || m) with m = beta * teacher +
    (1 - beta) * student.
    """
    kl = lambda p, q: jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixed = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)
