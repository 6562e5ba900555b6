"""`flaxen train`: fine-tuning, with progress, a log, a picture and resumption."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flaxen.cli.options import Count, Json, Loading, Source, about
from flaxen.cli.output import print_json, remark
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.train import Result

RANK = 8
"""Of adapters, unless another one or --full is asked for."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Learning:
    """How the model learns; the names of `flaxen.train.TrainConfig`."""

    steps: Annotated[Count | None, about("Optimiser steps; wins over --epochs.")] = None
    epochs: Annotated[float, about("Passes over the data.")] = 1.0
    batch_size: Annotated[Count, about("Rows in one micro-batch.")] = 4
    accumulation: Annotated[Count, about("Micro-batches to one step.")] = 1
    seq_len: Annotated[Count, about("Tokens in a row.")] = 512
    optimizer: Annotated[str, about("adamw, lion, sgd, momentum or adagrad.")] = "adamw"
    learning_rate: Annotated[float | None, about("Default: 2e-4 for LoRA, 1e-5 in full.")] = None
    schedule: Annotated[str, about("constant, linear or cosine.")] = "cosine"
    warmup: Annotated[Count, about("Steps until the full learning rate.")] = 0
    weight_decay: Annotated[float, about("On matrices only.")] = 0.0
    clip: Annotated[float, about("Longer gradients are shortened to this norm.")] = 1.0
    seed: Annotated[int, about("Order of the data, new adapters.")] = 0
    eval_every: Annotated[Count, about("Steps between evaluations; 0: before and after.")] = 0
    save_every: Annotated[Count, about("Steps between checkpoints; 0: only the last.")] = 0
    keep: Annotated[Count, about("Checkpoints that stay; 0: all.")] = 2
    remat: Annotated[
        bool | str, about("Less memory, more time; alone, or with a policy such as dots.")
    ] = False
    remat_every: Annotated[Count, about("Do so for every n-th layer.")] = 1


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters."""

    lora_rank: Annotated[Count | None, about(f"Inner width; default: {RANK}.")] = None
    lora_alpha: Annotated[float | None, about("Scale is alpha / rank; default: 2 rank.")] = None
    lora_targets: Annotated[
        list[str] | None, about("Modules, e.g. q_proj; may be repeated; default: all projections.")
    ] = None
    lora_rank_stabilised: Annotated[bool, about("Scale is alpha / sqrt(rank).")] = False


def train(
    model: Source,
    data: Annotated[str, about("JSONL (text, messages, prompt and completion) or plain text.")],
    *,
    output: Annotated[
        str, about("Folder for log, picture, checkpoints and result.")
    ] = "runs/train",
    eval_data: Annotated[str | None, about("Like data, to test on.")] = None,
    full: Annotated[bool, about("Train all weights instead of adapters.")] = False,
    no_packing: Annotated[bool, about("One document a row.")] = False,
    compute_dtype: Annotated[
        str | None, about("float32 or bfloat16; trained weights stay float32.")
    ] = None,
    resume: Annotated[bool, about("Go on from the last checkpoint.")] = False,
    adapters: Adapters = Adapters(),
    learning: Learning = Learning(),
    loading: Loading = Loading(),
    json: Json = False,
) -> int:
    """Fine-tune a model, in full or with low-rank adapters.

    In the output folder: log.jsonl, loss.png, checkpoints/, model/ (a Hugging Face folder, adapters
    merged) and adapter/ (a PEFT folder). Ctrl-C saves a checkpoint; --resume goes on from it.
    """
    if full and adapters.lora_rank:
        raise InputError("--full trains all weights and --lora-rank adapters; give one of them.")
    for path in (data, eval_data):
        if path is not None and not Path(path).is_file():
            raise InputError(f"There is no file {path!r} to learn from.")
    from flaxen.train import TrainConfig, train

    given: dict[str, Any] = {
        **_lora(adapters, full),
        **_values(learning),
        "learning_rate": learning.learning_rate or (1e-5 if full else 2e-4),
    }
    config = TrainConfig(
        output=output,
        packing=not no_packing,
        dtype=compute_dtype,
        resume=resume,
        progress=sys.stderr.isatty() and not json,
        **given,
    )
    tok = loading.tokenizer(model)
    loaded = loading.load(model)
    result = train(loaded, tok, data, config, eval_data=eval_data)
    if json:
        print_json(_told(result))
    else:
        _tell(result)
    return 0 if result.finished else 130


def _values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def _lora(adapters: Adapters, full: bool) -> dict[str, Any]:
    """The adapters' settings, as far as they were given."""
    if full:
        return {}
    rank = adapters.lora_rank or RANK
    given = {"lora_rank": rank, "lora_alpha": adapters.lora_alpha or 2.0 * rank}
    if adapters.lora_targets:
        given["lora_targets"] = tuple(adapters.lora_targets)
    return given | {"lora_rank_stabilised": adapters.lora_rank_stabilised}


def _told(result: Result) -> dict[str, Any]:
    paths = ("log_path", "model_path", "adapter_path", "picture_path")
    return {
        "step": result.step,
        "finished": result.finished,
        "losses": result.losses,
        "perplexities": result.perplexities,
        "tokens_per_second": result.tokens_per_second,
        **{name: getattr(result, name) for name in paths},
    }


def _tell(result: Result) -> None:
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        remark(f"Loss {first:.4f} -> {last:.4f}, {result.tokens_per_second:,.0f} tokens/s")
    found = list(result.perplexities.values())
    if found:
        remark(f"Perplexity on held-out data {found[0]:.2f} -> {found[-1]:.2f}")
    if not result.finished:
        remark(f"Stopped at step {result.step}; the checkpoint is kept: go on with --resume.")
    for kind in ("model", "adapter", "picture", "log"):
        path = getattr(result, f"{kind}_path")
        if path is not None:
            remark(f"{kind.capitalize()}: {path}")
