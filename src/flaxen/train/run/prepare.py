"""Everything that is checked and made before a run writes or computes anything."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from flaxen.core.errors import CheckpointError, InputError
from flaxen.families import find
from flaxen.layers.runtime import Runtime
from flaxen.train.checkpoint import Checkpoints, checksum
from flaxen.train.objectives import OBJECTIVES, Objective, Source
from flaxen.train.run.source import learned_from, tested_on
from flaxen.train.settings import Paths, TrainConfig
from flaxen.train.step import Trainer, TrainState, make_trainer
from flaxen.tune import adapters, add_lora
from flaxen.tune.peft import check_apart


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that may begin; nothing was written yet. tree: the model with its adapters."""

    model: Any
    tok: Any
    tree: Any
    runtime: Runtime
    config: TrainConfig
    objective: Objective
    trainer: Trainer
    state: TrainState
    source: Source
    held_out: Source | None
    checkpoints: Checkpoints
    step: int
    steps: int

    @property
    def output(self) -> Path:
        return Path(self.config.output)


def prepare(
    model: Any,
    tok: Any,
    data: Paths,
    eval_data: Paths | None,
    config: TrainConfig,
    *,
    reference: Any = None,
    reward: Any = None,
) -> Run:
    """
    Raises:
        InputError: data that cannot be learned from, or a model that cannot learn so.
        CheckpointError: the folder holds another run.
    """
    objective = OBJECTIVES[config.objective](config, tok, reward)
    objective.check(model.module)
    objective.begin(model, reference)
    source = learned_from(objective, tok, data)
    held_out = None if eval_data is None else tested_on(objective, tok, eval_data)
    steps = config.steps or math.ceil(config.epochs * source.per_epoch)
    about = {"data": source.fingerprint(), "model": checksum(model.module), "steps": steps}
    if reference is not None:
        about["reference"] = checksum(reference.module)
    folder = Path(config.output) / "checkpoints"
    checkpoints = Checkpoints(folder, config.must_match() | about, config.keep, config.keep_best)
    if checkpoints.steps() and not config.resume:
        raise CheckpointError(
            f"{config.output} holds a run that is at step {checkpoints.steps()[-1]}. "
            "Ask to resume it, or train into another folder."
        )
    tree, runtime = _adapted(model, config), model.runtime
    if (how := config.checkpointing()) is not None:
        runtime = dataclasses.replace(runtime, checkpointing=how)
    trainer, state = make_trainer(
        tree, runtime, config, steps, objective=objective, reference=_tree(reference, objective)
    )
    step = 0
    if checkpoints.steps():
        step, state = checkpoints.restore(like=state)
    return Run(
        model=model,
        tok=tok,
        tree=tree,
        runtime=runtime,
        config=config,
        objective=objective,
        trainer=trainer,
        state=state,
        source=source,
        held_out=held_out,
        checkpoints=checkpoints,
        step=step,
        steps=steps,
    )


def _adapted(model: Any, config: TrainConfig) -> Any:
    """The model's tree, with the adapters that are asked for."""
    if config.lora_rank is None:
        return model.module
    tree = add_lora(
        model.module,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=config.lora_targets,
        rank_stabilised=config.lora_rank_stabilised,
        seed=config.seed,
    )
    check_apart(adapters(tree), find(model.config.model_type).names)
    return tree


def _tree(reference: Any, objective: Objective) -> Any:
    if reference is None:
        return None
    if not objective.compares:
        raise InputError(
            f"The objective {objective.config.objective!r} compares with no other model; leave "
            "reference out."
        )
    return reference.module
