"""How good a run is on data that it does not learn from, and what it says."""

from __future__ import annotations

import math
import time

from flaxen.train.objectives import Source
from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.run.samples import sample
from flaxen.train.run.stop import Stopped
from flaxen.train.step import TrainState, place_batch, trained_tree


def evaluate(run: Run, log: Log, state: TrainState, step: int, stopped: Stopped) -> None:
    """Log the means over held-out data, and answers to prompts, each once for each step; nothing if
    it was stopped.
    """
    model = lambda: run.model.replace(module=trained_tree(state, run.tree))
    if run.held_out is not None and step not in log.eval_losses:
        start = time.perf_counter()
        if run.objective.online:
            found = run.objective.measured(model(), run.held_out)
        else:
            found = mean_losses(run, run.held_out, state, stopped)
        if found is None:
            return
        row = {"step": step} | {f"eval_{key}": value for key, value in found.items()}
        if run.objective.likelihood and found:
            row["perplexity"] = math.exp(min(found["loss"], 700))
        if found:
            log.write(row | {"eval_seconds": time.perf_counter() - start})
    if run.prompts and not stopped():
        sample(run.prompts, model(), run.tok, run.config.sample_tokens, log, step)


def mean_losses(
    run: Run, held_out: Source, state: TrainState, stopped: Stopped
) -> dict[str, float] | None:
    """Mean loss and means of what else is told, over `eval_batches` batches or all: empty if these
    have no target, as where none of a few tokens was hidden; None if it was stopped.
    """
    total = count = 0.0
    sums: dict[str, float] = {}
    batches = held_out.per_epoch
    for i in range(min(batches, run.config.eval_batches or batches)):
        if stopped():
            return None
        batch = held_out.batch_at(i)
        loss, told, weight = run.trainer.evaluate(
            state, run.trainer.frozen, place_batch(batch, run.runtime)
        )
        total, count = total + float(loss), count + float(weight)
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in told.items()}
    told = {"loss": total, **sums} if count else {}
    return {key: value / count for key, value in told.items()}
