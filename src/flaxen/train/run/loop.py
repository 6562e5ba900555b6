"""A whole run: data in, fine-tuned model out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flaxen.core.errors import InputError, RewardError
from flaxen.train.run.batches import batches_of
from flaxen.train.run.evaluate import evaluate
from flaxen.train.run.export import finish
from flaxen.train.run.folder import only_run
from flaxen.train.run.log import Log, Report
from flaxen.train.run.prepare import Run, prepare
from flaxen.train.run.result import Result
from flaxen.train.run.rows import Rows
from flaxen.train.run.sinks import check_sinks
from flaxen.train.run.stop import Stopped, stop_signals
from flaxen.train.run.watch import costs_of, watched
from flaxen.train.settings import Paths, TrainConfig
from flaxen.train.step import TrainState


def train(
    model: Any,
    tok: Any,
    data: Paths,
    config: TrainConfig | None = None,
    *,
    eval_data: Paths | None = None,
    on_step: Report | None = None,
    reference: Any = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    **settings: Any,
) -> Result:
    """Train a model and export it to `output`.

    `settings` are fields of `TrainConfig`, over those of `config`. `on_step` is given the log row
    of every step. reference: the model that an objective compares with, by default this one as it
    is now; reward: the function that an objective asks, or several. In `output`: log.jsonl,
    loss.png, checkpoints/, model/ (a Hugging Face folder) and, with `lora_rank`, adapter/ (a PEFT
    folder). SIGTERM and SIGINT end the run after the current step (or the last one that learns from
    the same completions), with a checkpoint. The given model stays as it is.

    Raises:
        InputError: for bad data, before anything is computed or written; of a stream when it comes,
            and a checkpoint of the steps before is kept.
        CheckpointError: when `output` holds a run and `resume` was not asked for, or one that
            differs from this.
        RewardError: the reward function failed; a checkpoint of the steps before is kept.
    """
    config = dataclasses.replace(config, **settings) if config else TrainConfig(**settings)
    check_sinks(config)
    run = prepare(model, tok, data, eval_data, config, reference=reference, reward=reward)
    with (
        only_run(run.output, run.checkpoints, run.step),
        run.checkpoints,
        stop_signals() as stopped,
    ):
        log = Log(run.output / "log.jsonl", run.step)
        step, state, signal = _steps(run, log, stopped, on_step)
        return finish(run, log, step, state, signal, data)


def _steps(
    run: Run, log: Log, stopped: Stopped, on_step: Report | None
) -> tuple[int, TrainState, int]:
    """All steps that are left, with a checkpoint at the end, and the signal that ended them."""
    config, trainer, state, step = run.config, run.trainer, run.state, run.step
    with watched(run, log):
        reports = [on_step] if on_step else []
        rows = Rows(log, run.per_epoch, reports, config.patience, costs_of(run))
        batches = batches_of(run)
        try:
            if step or config.eval_at_start:
                evaluate(run, log, state, step, stopped)
            rows.pause()
            while step < run.steps and not (stopped() and run.between(step)):
                batch, told = batches.at(step, state)
                state, metrics = trainer.step(state, trainer.frozen, batch)
                step += 1
                batches.after(step)
                rows.add(step, metrics | told, batch)
                due = lambda every, now=step: bool(every) and now % every == 0
                if step < run.steps and (due(config.eval_every) or due(config.save_every)):
                    rows.settle()
                    if due(config.eval_every):
                        evaluate(run, log, state, step, stopped)
                    if due(config.save_every):
                        _save(run, log, state, step)
                    rows.pause()
            rows.settle()
            signal = stopped()
            if not signal:
                evaluate(run, log, state, step, stopped)
                signal = stopped()
        except (InputError, RewardError):
            rows.settle()
            if run.between(step):
                _save(run, log, state, step)
            raise
    _save(run, log, state, step)
    run.checkpoints.close()
    return step, state, signal


def _save(run: Run, log: Log, state: TrainState, step: int) -> None:
    """Begin a checkpoint, with all that a run needs to go on elsewhere, unless nothing is new."""
    if step == run.step or step in run.checkpoints.steps():
        return
    about = {
        "steps": run.steps,
        "data": {"step": step, "epoch": step / run.per_epoch},
        "seed": run.config.seed,
        "runtime": json.loads(run.runtime.to_json()),
        "processes": jax.process_count(),
    }
    run.checkpoints.save(step, state, about, log.eval_losses.get(step, math.inf))
