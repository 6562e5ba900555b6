"""A whole run: data in, fine-tuned model out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flaxen.core.errors import RewardError
from flaxen.train.run.batches import batches_of
from flaxen.train.run.evaluate import evaluate
from flaxen.train.run.export import finish
from flaxen.train.run.log import Log, Report, progress_bar
from flaxen.train.run.prepare import Run, prepare
from flaxen.train.run.result import Result
from flaxen.train.run.rows import Rows
from flaxen.train.run.stop import stop_signals
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
        InputError: for bad data, before anything is computed or written.
        CheckpointError: when `output` holds a run and `resume` was not asked for, or one that
            differs from this.
        RewardError: the reward function failed; a checkpoint of the steps before is kept.
    """
    config = dataclasses.replace(config, **settings) if config else TrainConfig(**settings)
    run = prepare(model, tok, data, eval_data, config, reference=reference, reward=reward)
    with stop_signals() as stopped:
        step, state = _steps(run, stopped, on_step)
    return finish(run, step, state)


def _steps(run: Run, stopped: Callable[[], bool], on_step: Report | None) -> tuple[int, TrainState]:
    """All steps that are left, with a checkpoint at the end."""
    config, trainer, state, step = run.config, run.trainer, run.state, run.step
    run.output.mkdir(parents=True, exist_ok=True)
    log = Log(run.output / "log.jsonl", step)
    with progress_bar(run.steps, step, config.progress) as report:
        rows = Rows(log, step, run.per_epoch, [report, *([on_step] if on_step else [])])
        batches = batches_of(run)
        evaluate(run, log, state, step)
        rows.pause()
        try:
            while step < run.steps and not (stopped() and run.between(step)):
                batch, told = batches.at(step, state)
                state, metrics = trainer.step(state, trainer.frozen, batch)
                step += 1
                batches.after(step)
                rows.add(step, metrics | told)
                due = lambda every, now=step: bool(every) and now % every == 0
                if step < run.steps and (due(config.eval_every) or due(config.save_every)):
                    rows.settle()
                    if due(config.save_every):
                        run.checkpoints.save(step, state)
                    if due(config.eval_every):
                        evaluate(run, log, state, step)
                    rows.pause()
        except RewardError:
            rows.settle()
            if run.between(step):
                _save(run, step, state)
            raise
        rows.settle()
    _save(run, step, state)
    if step == run.steps:
        evaluate(run, log, state, step)
    return step, state


def _save(run: Run, step: int, state: TrainState) -> None:
    """A checkpoint, unless there is nothing new."""
    if step > run.step and step not in run.checkpoints.steps():
        run.checkpoints.save(step, state)
