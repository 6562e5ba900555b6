"""A whole run: data in, fine-tuned model out."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from flaxen.core.errors import CheckpointError, FlaxenError
from flaxen.families import find
from flaxen.layers.runtime import Runtime
from flaxen.models.skeleton import only_generating
from flaxen.show import loss_picture
from flaxen.train.checkpoint import Checkpoints, checksum
from flaxen.train.config import Paths, TrainConfig
from flaxen.train.data import read_records, tokenise
from flaxen.train.log import Log, Report, progress_bar
from flaxen.train.packing import Batches, make_batches
from flaxen.train.step import Metrics, Trainer, TrainState, make_trainer, place_batch, trained_tree
from flaxen.train.stop import stop_signals
from flaxen.tune import adapters, add_lora, merge, save_adapter
from flaxen.tune.peft import check_apart

PATIENCE = 10
"""Steps in a row with a gradient that is not finite before a run gives up."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    model: with the trained weights, adapters merged; rows: the log; finished: False if a signal
    stopped the run before its last step (then only a checkpoint was written); model_path,
    adapter_path, picture_path: None if not written.
    """

    model: Any
    output: Path
    log_path: Path
    step: int
    finished: bool
    rows: list[dict[str, Any]]
    model_path: Path | None = None
    adapter_path: Path | None = None
    picture_path: Path | None = None

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def perplexities(self) -> dict[int, float]:
        """Perplexity on held-out data after so many steps."""
        return {row["step"]: row["perplexity"] for row in self.rows if "perplexity" in row}

    @property
    def tokens_per_second(self) -> float:
        """Targets per second, the median step; the first, which compiles, counts only if it is the
        only one.
        """
        speeds = [row["tokens_per_second"] for row in self.rows if "loss" in row]
        return statistics.median(speeds[1:] or speeds or [math.nan])


def train(
    model: Any,
    tok: Any,
    data: Paths,
    config: TrainConfig | None = None,
    *,
    eval_data: Paths | None = None,
    on_step: Report | None = None,
    **settings: Any,
) -> Result:
    """Fine-tune a model on `.jsonl` or text files and export it to `output`.

    `settings` are fields of `TrainConfig`, over those of `config`. `on_step` is given the log row
    of every step. In `output`: log.jsonl, loss.png, checkpoints/, model/ (a Hugging Face folder)
    and, with `lora_rank`, adapter/ (a PEFT folder). SIGTERM and SIGINT end the run after the
    current step, with a checkpoint. The given model stays as it is.

    Raises:
        InputError: for bad data, before anything is computed or written.
        CheckpointError: when `output` holds a run and `resume` was not asked for, or one that
            differs from this.
    """
    only_generating(model.module, "be trained on text by this loop")
    config = dataclasses.replace(config, **settings) if config else TrainConfig(**settings)
    batches = _batches(tok, data, config, config.accumulation)
    held_out = None if eval_data is None else _batches(tok, eval_data, config, 1)
    run = _prepare(model, tok, batches, held_out, config)
    with stop_signals() as stopped:
        step, state = _run(run, stopped, on_step)
    return _finish(run, step, state)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that may begin; nothing was written yet."""

    model: Any
    tok: Any
    tree: Any
    runtime: Runtime
    config: TrainConfig
    trainer: Trainer
    state: TrainState
    batches: Batches
    held_out: Batches | None
    checkpoints: Checkpoints
    step: int
    steps: int

    @property
    def output(self) -> Path:
        return Path(self.config.output)


def _batches(tok: Any, paths: Paths, config: TrainConfig, accumulation: int) -> Batches:
    return make_batches(
        tokenise(tok, read_records(paths), config.seq_len),
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        accumulation=accumulation,
        seed=config.seed,
        packing=config.packing,
    )


def _prepare(
    model: Any, tok: Any, batches: Batches, held_out: Batches | None, config: TrainConfig
) -> _Run:
    steps = config.steps or math.ceil(config.epochs * batches.per_epoch)
    common = {"data": batches.fingerprint(), "model": checksum(model.module), "steps": steps}
    folder = Path(config.output) / "checkpoints"
    checkpoints = Checkpoints(folder, config.must_match() | common, config.keep)
    if checkpoints.steps() and not config.resume:
        raise CheckpointError(
            f"{config.output} holds a run that is at step {checkpoints.steps()[-1]}. "
            "Ask to resume it, or train into another folder."
        )
    tree, runtime = model.module, model.runtime
    if config.lora_rank is not None:
        tree = add_lora(
            tree,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            rank_stabilised=config.lora_rank_stabilised,
            seed=config.seed,
        )
        check_apart(adapters(tree), find(model.config.model_type).names)
    if (how := config.checkpointing()) is not None:
        runtime = dataclasses.replace(runtime, checkpointing=how)
    trainer, state = make_trainer(tree, runtime, config, steps)
    step = 0
    if checkpoints.steps():
        step, state = checkpoints.restore(like=state)
    return _Run(
        model,
        tok,
        tree,
        runtime,
        config,
        trainer,
        state,
        batches,
        held_out,
        checkpoints,
        step,
        steps,
    )


class _Rows:
    """The log, one step behind the device: a step's numbers are read when the next step is already
    under way.
    """

    def __init__(self, log: Log, step: int, per_epoch: int, reports: list[Report]):
        self.log, self.per_epoch, self.reports = log, per_epoch, reports
        self.waiting: tuple[int, Metrics] | None = None
        self.before = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        self.settle()
        self.waiting = step, metrics

    def settle(self) -> None:
        """Write the row of the step that is still out."""
        if self.waiting is None:
            return
        (step, metrics), self.waiting = self.waiting, None
        numbers = {key: value.item() for key, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self.before = now - self.before, now
        bad = numbers.pop("bad")
        row = {"step": step, "epoch": step / self.per_epoch, **numbers, "seconds": seconds}
        row["tokens_per_second"] = numbers["tokens"] / seconds
        self.log.write(row)
        for report in self.reports:
            report(row)
        if bad >= PATIENCE:
            raise FlaxenError(
                f"The gradient was not finite {bad} steps in a row, up to step {step}; those steps "
                "changed no weight. Lower the learning rate, look at their data, or compute in "
                "float32."
            )

    def pause(self) -> None:
        """Leave out the time since the last row."""
        self.before = time.perf_counter()


def _run(run: _Run, stopped: Callable[[], bool], on_step: Report | None) -> tuple[int, TrainState]:
    """All steps that are left, with a checkpoint at the end."""
    config, trainer, state, step = run.config, run.trainer, run.state, run.step
    run.output.mkdir(parents=True, exist_ok=True)
    log = Log(run.output / "log.jsonl", step)
    with progress_bar(run.steps, step, config.progress) as report:
        rows = _Rows(log, step, run.batches.per_epoch, [report, *([on_step] if on_step else [])])
        _evaluate(run, log, state, step)
        rows.pause()
        batch = place_batch(run.batches.batch_at(step), run.runtime)
        while step < run.steps and not stopped():
            state, metrics = trainer.step(state, trainer.frozen, batch)
            step += 1
            batch = place_batch(run.batches.batch_at(step), run.runtime)
            rows.add(step, metrics)
            due = lambda every, now=step: bool(every) and now % every == 0
            if step < run.steps and (due(config.eval_every) or due(config.save_every)):
                rows.settle()
                if due(config.eval_every):
                    _evaluate(run, log, state, step)
                if due(config.save_every):
                    run.checkpoints.save(step, state)
                rows.pause()
        rows.settle()
    if step == run.steps:
        _evaluate(run, log, state, step)
    if step > run.step and step not in run.checkpoints.steps():
        run.checkpoints.save(step, state)
    return step, state


def _evaluate(run: _Run, log: Log, state: TrainState, step: int) -> None:
    """Log loss and perplexity on held-out data, once for each step."""
    if run.held_out is None or any("perplexity" in r and r["step"] == step for r in log.rows()):
        return
    total = count = 0.0
    for i in range(run.held_out.per_epoch):
        batch = place_batch(run.held_out.batch_at(i), run.runtime)
        nll, targets = run.trainer.evaluate(state, run.trainer.frozen, batch)
        total, count = total + float(nll), count + float(targets)
    loss = total / count
    log.write({"step": step, "eval_loss": loss, "perplexity": math.exp(min(loss, 700))})


def _finish(run: _Run, step: int, state: TrainState) -> Result:
    """The trained model and, if the run is complete, its files."""
    config, output = run.config, run.output
    tree = trained_tree(state, run.tree)
    model = run.model.replace(module=merge(tree) if config.lora_rank else tree)
    log = Log(output / "log.jsonl", step)
    result = Result(model, output, log.path, step, step == run.steps, log.rows())
    if not result.finished:
        return result
    files: dict[str, Path] = {"model_path": output / "model"}
    model.save(files["model_path"], tokenizer=run.tok)
    if config.lora_rank:
        family = find(run.model.config.model_type)
        files["adapter_path"] = save_adapter(
            tree,
            output / "adapter",
            family.names,
            alpha=config.lora_alpha,
            rank_stabilised=config.lora_rank_stabilised,
            fan_in_fan_out=family.fan_in_fan_out,
            base=str(run.model.origin.folder) if run.model.origin.folder else None,
        )
    if importlib.util.find_spec("matplotlib"):
        files["picture_path"] = loss_picture(log.path, output / "loss.png")
    return dataclasses.replace(result, **files)
