"""How good a run is on data that it does not learn from."""

from __future__ import annotations

import math

from flaxen.train.objectives import Source
from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.step import TrainState, place_batch, trained_tree


def evaluate(run: Run, log: Log, state: TrainState, step: int) -> None:
    """Log the means over all held-out data, once for each step."""
    done = lambda row: row["step"] == step and any(key.startswith("eval_") for key in row)
    if run.held_out is None or any(map(done, log.rows())):
        return
    if run.objective.online:
        model = run.model.replace(module=trained_tree(state, run.tree))
        found = run.objective.measured(model, run.held_out)
    else:
        found = _losses(run, run.held_out, state)
    row = {"step": step} | {f"eval_{key}": value for key, value in found.items()}
    if run.objective.likelihood:
        row["perplexity"] = math.exp(min(found["loss"], 700))
    log.write(row)


def _losses(run: Run, held_out: Source, state: TrainState) -> dict[str, float]:
    """Mean loss, and means of what else is told."""
    total = count = 0.0
    sums: dict[str, float] = {}
    for i in range(held_out.per_epoch):
        batch = held_out.batch_at(i)
        loss, told, weight = run.trainer.evaluate(
            state, run.trainer.frozen, place_batch(batch, run.runtime)
        )
        total, count = total + float(loss), count + float(weight)
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in told.items()}
    return {key: value / count for key, value in {"loss": total, **sums}.items()}
