"""How good a run is on data that it does not learn from, and what it says."""

from __future__ import annotations

import math
import time

from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.run.samples import sample
from flaxen.train.run.stop import Stopped
from flaxen.train.step import TrainState, place_batch, trained_tree


def evaluate(run: Run, log: Log, state: TrainState, step: int, stopped: Stopped) -> None:
    """Log the means over held-out data, and answers to prompts, each once for each step; nothing if
    it was stopped.
    """
    if run.held_out is not None and step not in log.eval_losses:
        row = _means(run, state, step, stopped)
        if row is None:
            return
        log.write(row)
    if run.prompts and not stopped():
        model = run.model.replace(module=trained_tree(state, run.tree))
        sample(run.prompts, model, run.tok, run.config.sample_tokens, log, step)


def _means(run: Run, state: TrainState, step: int, stopped: Stopped) -> dict[str, float] | None:
    """The row of an evaluation, over `eval_batches` batches or all."""
    assert run.held_out is not None
    start, total, count = time.perf_counter(), 0.0, 0.0
    sums: dict[str, float] = {}
    batches = run.held_out.per_epoch
    for i in range(min(batches, run.config.eval_batches or batches)):
        if stopped():
            return None
        batch = run.held_out.batch_at(i)
        loss, told, weight = run.trainer.evaluate(
            state, run.trainer.frozen, place_batch(batch, run.runtime)
        )
        total, count = total + float(loss), count + float(weight)
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in told.items()}
    loss = total / count
    row = {"step": step, "eval_loss": loss}
    row |= {f"eval_{key}": value / count for key, value in sums.items()}
    if run.objective.likelihood:
        row["perplexity"] = math.exp(min(loss, 700))
    return row | {"eval_seconds": time.perf_counter() - start}
