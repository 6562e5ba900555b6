"""Heads that give labels: of rows, of choices, of tokens, of the ends of an answer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import module, static
from flaxen.layers.linear import Linear
from flaxen.layers.norm import Identity
from flaxen.models.heads import Head, Last, classes
from flaxen.models.inputs import array
from flaxen.models.losses import binary_cross_entropy, cross_entropy, squared_error
from flaxen.models.outputs import LogitsOutput, SpanOutput

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


@module
class SequenceHead(Head):
    """Labels of a whole row: pool, hidden, out_proj. problem: what a config says of the labels, or
    None: then they say it themselves, as in Transformers.
    """

    pool: Any
    hidden: Any = Identity()
    out_proj: Linear
    problem: static[str | None] = None
    input_dropout: static[float] = 0.0
    dropout: static[float] = 0.0
    name: ClassVar[str] = "sequence classification"

    def __call__(self, last: Last) -> LogitsOutput:
        x = last.drop(self.pool(last.states, last.keep), self.input_dropout)
        return LogitsOutput(logits=self.out_proj(last.drop(self.hidden(x), self.dropout, 1)))

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        labels = targets["labels"]
        problem = self._problem(labels)
        if problem == "regression":
            return squared_error(out.logits, labels)
        single = problem == "single_label_classification"
        return (cross_entropy if single else binary_cross_entropy)(out.logits, labels)

    def labels(self) -> int:
        return self.out_proj.weight.shape[0]

    def _problem(self, labels: Any) -> str:
        if self.problem is not None:
            return self.problem
        if self.out_proj.weight.shape[0] == 1:
            return "regression"
        return PROBLEMS[1 if np.issubdtype(labels.dtype, np.integer) else 2]

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        if "labels" not in targets:
            return {}
        rows, count = shape[0], self.out_proj.weight.shape[0]
        labels = array(targets["labels"])
        if self._problem(labels) == "single_label_classification":
            return {"labels": classes("labels", labels.reshape(-1), (rows,), count)}
        if labels.shape != (rows, count) and (count > 1 or labels.shape != (rows,)):
            raise InputError(f"labels have shape {labels.shape}; expected {(rows, count)}.")
        return {"labels": labels}


@module
class ChoiceHead(Head):
    """Which of C texts, ids (B, C, T)."""

    pool: Any
    pooler: Any
    choice: Linear
    dropout: static[float] = 0.0
    ids: ClassVar[int] = 3
    name: ClassVar[str] = "multiple choice"

    def __call__(self, last: Last) -> LogitsOutput:
        x = self.pooler(self.pool(last.states, last.keep))
        return LogitsOutput(logits=self.choice(last.drop(x, self.dropout)).reshape(last.rows))

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        return cross_entropy(out.logits, targets["labels"])

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        return {k: classes(k, x, shape[:1], shape[1]) for k, x in targets.items()}


@module
class TokenHead(Head):
    """Labels of each token."""

    transform: Any = Identity()
    classifier: Linear
    dropout: static[float] = 0.0
    name: ClassVar[str] = "token classification"

    def __call__(self, last: Last) -> LogitsOutput:
        x = last.drop(self.transform(last.states), self.dropout)
        return LogitsOutput(logits=self.classifier(x))

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        return cross_entropy(out.logits, targets["labels"])

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        count = self.classifier.weight.shape[0]
        return {k: classes(k, x, shape, count) for k, x in targets.items()}


@module
class SpanHead(Head):
    """Where an answer begins and ends."""

    transform: Any = Identity()
    qa_outputs: Linear
    dropout: static[float] = 0.0
    targets: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    name: ClassVar[str] = "question answering"

    def __call__(self, last: Last) -> SpanOutput:
        both = self.qa_outputs(last.drop(self.transform(last.states), self.dropout))
        return SpanOutput(start_logits=both[..., 0], end_logits=both[..., 1])

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        if len(targets) < 2:
            return None
        T = out.start_logits.shape[1]
        ends = ((out.start_logits, "start_positions"), (out.end_logits, "end_positions"))
        # A position outside of the row counts for nothing.
        losses = [cross_entropy(x, jnp.clip(targets[k], 0, T), ignored=T) for x, k in ends]
        return (losses[0] + losses[1]) / 2

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        return {k: classes(k, array(x).reshape(-1), shape[:1], None) for k, x in targets.items()}


def known_problem(problem: str | None) -> str | None:
    """
    Raises:
        ConfigError: a problem_type that is none.
    """
    if problem not in (None, *PROBLEMS):
        raise ConfigError(f"problem_type is {problem!r}; expected one of {', '.join(PROBLEMS)}.")
    return problem
