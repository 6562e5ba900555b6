"""The seam between a run and what it minimises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import numpy as np

from flaxen.core.errors import ConfigError, InputError
from flaxen.layers.runtime import Runtime
from flaxen.train.data.kinds import CAUSAL
from flaxen.train.data.parts import Part

Batch = dict[str, Any]
"""Arrays (accumulation, rows) or (accumulation, rows, tokens); of one micro-batch without the first
axis. Token ids are int32, targets stand at the slot that predicts them, and -100 is ignored.

Of a step there are `dropout_keys` besides, (accumulation,).
"""

Metrics = dict[str, jax.Array]


class Source(Protocol):
    """All batches of a run: a pure function of its data, settings and the step."""

    @property
    def per_epoch(self) -> int:
        """Steps of one pass over the data."""
        ...

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of step 0, 1, ...; as many as are asked for."""
        ...

    def fingerprint(self) -> str:
        """A hash of all that is learned from."""
        ...

    def mixed(self, others: Sequence[Self], weights: Sequence[float]) -> Self:
        """This and others by weight: their rows take turns."""
        ...


class Prepared(NamedTuple):
    """batch: what is learned from; told: what to tell of it; samples: rows of completions.jsonl."""

    batch: dict[str, np.ndarray]
    told: dict[str, float]
    samples: list[dict[str, Any]]


class Objective:
    """What is minimised: which records it reads, what batches it makes of them, what a batch costs.

    It is made from the run's settings. Nothing of it changes while a run goes on.
    """

    likelihood: ClassVar[bool] = False
    """Whether its loss is a mean of -log p, so that exp(loss) is a perplexity."""
    compares: bool = False
    """Whether it needs a second model that stays as it is: `reference`."""

    kinds: ClassVar[tuple[str, ...]] = CAUSAL
    """Which kinds of records it reads, of `data.kinds.KINDS`."""

    online: ClassVar[bool] = False
    """Whether a batch is made with the weights of its step: see `prepared`."""
    steps_per_batch: int = 1
    """How many steps learn from one batch. A run begins, stops and is saved between batches."""

    reads: ClassVar[tuple[str, ...] | None] = None
    """Which settings of `settings.unread.OF_OBJECTIVES` it reads; a run that gives others is
    refused. None: any.
    """
    needs: ClassVar[tuple[str, ...]] = ()
    """Which of `reference` and `reward` a run must give."""

    defaults: ClassVar[Mapping[str, Any]] = {"beta": 0.1, "loss_type": "sigmoid"}
    """Settings that are None unless given, and what they are here."""

    def __init__(self, config: Any, tok: Any = None, reward: Any = None):
        """tok: the tokenizer; reward: the user's function, for objectives that ask one.

        Raises:
            ConfigError: settings that this objective cannot follow.
        """
        mine = lambda key: self.reads is None or key in self.reads
        unset = {k: x for k, x in self.defaults.items() if mine(k) and getattr(config, k) is None}
        self.config = dataclasses.replace(config, **unset)
        self.tok, self.reward = tok, reward
        if self.config.beta == 0 < self.defaults["beta"]:
            raise ConfigError(f"beta is 0 for {config.objective!r}; expected more than 0.")

    def check(self, module: Any) -> None:
        """
        Raises:
            InputError: a model that it cannot train.
        """

    def begin(self, model: Any, reference: Any) -> None:
        """Look at the models of a run (`Model`s; no reference is None) before it reads its data.

        Raises:
            InputError: models that do not go together.
        """

    def source(self, tok: Any, records: Any, accumulation: int) -> Source:
        """Batches of records, each of which names its file and line.

        Raises:
            InputError: records that it cannot learn from, by file and line.
        """
        raise NotImplementedError

    def held_out(self, tok: Any, records: Any) -> Source:
        """Batches to evaluate on, of one micro-batch each."""
        return self.source(tok, records, 1)

    def stream(self, tok: Any, parts: Sequence[Part], accumulation: int) -> Source:
        """Batches of data that is read while a run goes on.

        Raises:
            InputError: the objective has no use for such.
        """
        raise InputError(
            f"The objective {self.config.objective!r} reads its data whole; leave streaming out."
        )

    def prepared(self, batch: dict[str, np.ndarray], model: Any, step: int) -> Prepared:
        """What is learned from in place of a batch of the source, if the objective is `online`;
        model: a `Model` with the weights as they are before the step.

        Raises:
            RewardError: the user's function failed.
        """
        raise NotImplementedError

    def observed(self, model: Any, reference: Any, batch: Batch, runtime: Runtime) -> Batch:
        """What is added to a micro-batch that was prepared, and stays as it is in all steps that
        learn from it; model and reference as in `loss`.
        """
        return {}

    def measured(self, model: Any, source: Source) -> dict[str, float]:
        """How good a `Model` is on held-out data, if the objective is `online`."""
        raise NotImplementedError

    def weight(self, batch: Batch) -> jax.Array:
        """How much a batch counts: its targets, or its rows."""
        raise NotImplementedError

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        """The sum of the losses of one micro-batch, and the sums of what else is told of it; both
        are divided by the weight of the whole batch. reference: the model before training, or
        another one; None unless `compares`.
        """
        raise NotImplementedError
