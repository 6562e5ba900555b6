"""How good a run is on data that it does not learn from."""

from __future__ import annotations

import math

from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.run.stop import Stopped
from flaxen.train.step import TrainState, place_batch


def evaluate(run: Run, log: Log, state: TrainState, step: int, stopped: Stopped) -> None:
    """Log the means over all held-out data, once for each step; nothing if it was stopped."""
    if run.held_out is None or step in log.eval_losses:
        return
    total = count = 0.0
    sums: dict[str, float] = {}
    for i in range(run.held_out.per_epoch):
        if stopped():
            return
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
    log.write(row)
