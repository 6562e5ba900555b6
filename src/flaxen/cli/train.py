"""`flaxen train`: fine-tuning, with progress, a log, a picture and resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flaxen.cli.options import Count, Loading, Source, about
from flaxen.cli.output import progress_bar, remark
from flaxen.core.errors import InputError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Learning:
    """How the model learns; the names of `flaxen.train.Settings`."""

    steps: Annotated[Count | None, about("Optimiser steps; default: one pass.")] = None
    batch_size: Annotated[Count, about("Rows in one micro-batch.")] = 4
    sequence_length: Annotated[Count, about("Tokens in a row.")] = 512
    accumulate: Annotated[Count, about("Micro-batches to one step.")] = 1
    learning_rate: Annotated[float | None, about("Default: 2e-4 for LoRA, 1e-5 in full.")] = None
    warmup_steps: Annotated[Count, about("Steps until the full learning rate.")] = 0
    weight_decay: Annotated[float, about("On matrices only.")] = 0.0
    max_grad_norm: Annotated[float, about("Longer gradients are shortened.")] = 1.0
    seed: Annotated[int, about("Order of the data, new adapters.")] = 0
    save_every: Annotated[Count | None, about("Steps between checkpoints.")] = None
    eval_every: Annotated[Count | None, about("Steps between evaluations.")] = None
    remat: Annotated[bool, about("Less memory, more time.")] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters."""

    lora_rank: Annotated[Count | None, about("Inner width; default: 8.")] = None
    lora_alpha: Annotated[float | None, about("Scale is alpha / rank; default: 2 rank.")] = None
    lora_target: Annotated[list[str] | None, about("Modules, e.g. q_proj; may be repeated.")] = None


def train(
    model: Source,
    data: Annotated[str, about("JSONL with `text` or `messages`, or plain text.")],
    *,
    output: Annotated[
        str, about("Folder for log, picture, checkpoints and result.")
    ] = "runs/train",
    eval_data: Annotated[str | None, about("Like data, to test on.")] = None,
    full: Annotated[bool, about("Train all weights instead of adapters.")] = False,
    merge: Annotated[bool, about("Save a whole model with the adapters in it.")] = False,
    resume: Annotated[bool, about("Go on from the last checkpoint.")] = False,
    adapters: Adapters = Adapters(),
    learning: Learning = Learning(),
    loading: Loading = Loading(),
) -> None:
    """Fine-tune a model, in full or with low-rank adapters."""
    if full and adapters.lora_rank:
        raise InputError("--full trains all weights and --lora-rank adapters; give one of them.")
    rank = 0 if full else adapters.lora_rank or 8
    alpha = adapters.lora_alpha or 2.0 * rank
    for path in (data, eval_data):
        if path is not None and not Path(path).is_file():
            raise InputError(f"There is no file {path!r} to learn from.")
    import flaxen
    from flaxen.families import find
    from flaxen.show import loss_picture
    from flaxen.train import Settings, fit
    from flaxen.tune import add_lora, save_adapter
    from flaxen.tune import merge as merged

    tok = flaxen.tokenizer(model)
    with progress_bar("Loading") as progress:
        loaded = loading.load(model, progress=progress)
    if rank:
        chosen = {"targets": adapters.lora_target} if adapters.lora_target else {}
        loaded = add_lora(loaded, rank=rank, alpha=alpha, seed=learning.seed, **chosen)
    settings = Settings(**_settings(learning, rank))
    with step_bar() as on_step:
        loaded = fit(
            loaded, tok, data, settings, output, eval_data=eval_data, resume=resume, on_step=on_step
        )
    folder = Path(output)
    remark(f"Loss: {loss_picture(folder / 'log.jsonl', folder / 'loss.png')}")
    if rank:
        names = find(loaded.config.model_type).names
        save_adapter(loaded, folder / "adapters", names, alpha=alpha, base=model)
        remark(f"Adapters: {folder / 'adapters'}")
    if merge or not rank:
        (merged(loaded) if rank else loaded).save(folder / "model", tokenizer=tok)
        remark(f"Model: {folder / 'model'}")


def _settings(learning: Learning, rank: int) -> dict[str, Any]:
    values = {field.name: getattr(learning, field.name) for field in fields(learning)}
    rate = learning.learning_rate or (2e-4 if rank else 1e-5)
    return {**values, "learning_rate": rate}


@contextmanager
def step_bar() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on stderr with loss, tokens/s and the time that is left.

    Given the rows of the log: `step`, `steps`, `loss`, `tokens_per_second`, perhaps `eval_loss`.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def on_step(row: dict[str, Any]) -> None:
            words = [f"loss {row['loss']:.3f}", f"{row['tokens_per_second']:,.0f} tokens/s"]
            bar.update(
                task, completed=row["step"], total=row["steps"], description="  ".join(words)
            )
            if "eval_loss" in row:
                bar.console.print(f"step {row['step']}: evaluation loss {row['eval_loss']:.3f}")

        yield on_step
