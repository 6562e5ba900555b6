"""Where the batches of a run come from: planned ones, or made with the weights of their step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxen.core.errors import InputError
from flaxen.train.data.stream import Stream
from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.run.vocabulary import check_ids
from flaxen.train.step import TrainState, place_batch, trained_tree

Told = dict[str, Any]


class Ahead:
    """Each batch is on its way to the devices while the step before it runs."""

    def __init__(self, run: Run):
        self.run = run
        self.next: Any = None

    def at(self, step: int, state: TrainState) -> tuple[Any, Told]:
        """The batch of a step, and what to tell of it besides what the step does.

        Raises:
            InputError: what is read while the run goes on is bad.
        """
        found, self.next = self.next, None
        if isinstance(found, InputError):
            raise found
        return self._placed(step) if found is None else found, {}

    def after(self, step: int) -> None:
        """While a step runs that was just begun; `step` is the one that follows. What is wrong with
        its batch is told when that is asked for, and this step is done.
        """
        try:
            self.next = self._placed(step)
        except InputError as error:
            self.next = error

    def _placed(self, step: int) -> Any:
        batch = self.run.source.batch_at(step)
        if isinstance(self.run.source, Stream):  # which nobody has read before
            check_ids(batch, self.run.model.module.embed_tokens.vocab_size)
        return place_batch(batch, self.run.runtime)


class Rollouts(Ahead):
    """Batches made with the weights as they are, and kept for the steps that learn from them; what
    was sampled goes into completions.jsonl.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        self.log = (
            Log(run.output / "completions.jsonl", run.step) if jax.process_index() == 0 else None
        )
        self.kept: Any = None

    def at(self, step: int, state: TrainState) -> tuple[Any, Told]:
        """
        Raises:
            RewardError: the user's function failed.
        """
        if self.run.between(step):
            self.kept = None  # Its memory is free for the next one.
            self.kept = self._made(step, state)
        return self.kept

    def after(self, step: int) -> None:
        """The next weights are not there yet."""

    def _made(self, step: int, state: TrainState) -> tuple[Any, Told]:
        run, objective = self.run, self.run.objective
        model = run.model.replace(module=trained_tree(state, run.tree))
        planned = run.source.batch_at(step // objective.steps_per_batch)
        made = objective.prepared(planned, model, step)
        if self.log is not None:
            for sample in made.samples:
                self.log.write({"step": step + 1} | sample)
        batch = place_batch(made.batch, run.runtime)
        batch |= run.trainer.observe(state, run.trainer.frozen, batch)
        return batch, {key: np.float32(x) for key, x in made.told.items()}


def batches_of(run: Run) -> Ahead:
    """The batches of a run, in the order of its steps."""
    return Rollouts(run) if run.objective.online else Ahead(run)
