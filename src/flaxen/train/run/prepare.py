"""Everything that is checked and made before a run writes or computes anything."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from flaxen.convert.relation import Relation, relate
from flaxen.convert.together import agreed, everybody
from flaxen.core.errors import CheckpointError, InputError
from flaxen.families.config import described
from flaxen.layers.runtime import Runtime
from flaxen.train.checkpoint import Checkpoints, checksum
from flaxen.train.objectives import OBJECTIVES, Objective, Source
from flaxen.train.run.folder import check_output
from flaxen.train.run.going_on import check_processes, check_steps
from flaxen.train.run.samples import Prompt, sample_prompts
from flaxen.train.run.source import learned_from, tested_on
from flaxen.train.run.vocabulary import check_length, check_vocabulary
from flaxen.train.settings import Paths, RunConfig, TrainConfig
from flaxen.train.step import Trainer, TrainState, make_trainer
from flaxen.tune import adapters, add_lora, without_adapters
from flaxen.tune.modules import check_apart

NEEDED = {"reward": "FILE.py:NAME", "reference": "MODEL"}
"""How what an objective needs is said on the command line."""


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
    prompts: list[Prompt] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> Path:
        return Path(self.config.output)

    @property
    def per_epoch(self) -> int:
        """Steps of one pass over the data."""
        return self.source.per_epoch * self.objective.steps_per_batch

    def between(self, step: int) -> bool:
        """Whether the next step begins with a batch of its own, so that a run may stop there."""
        return step % self.objective.steps_per_batch == 0


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
    # Before anything that processes do together: one that fails alone would let the others wait.
    with agreed(everybody(), "begin"):
        check_output(config.output)
        objective = OBJECTIVES[config.objective](config, tok, reward)
        if reward is not None and not objective.online:
            raise InputError(
                f"The objective {config.objective!r} asks no reward function; leave reward out."
            )
        objective.check(model.module)
        check_length(model.module, config.seq_len)
        objective.begin(model, reference)
        source = learned_from(objective, tok, data)
        held_out = None if eval_data is None else tested_on(objective, tok, eval_data)
        check_vocabulary(model.module, tok, source, held_out)
        known = source.fingerprint()
    steps = config.steps or math.ceil(config.epochs * source.per_epoch * objective.steps_per_batch)
    about = {"data": known, "model": checksum(model.module)}
    if reference is not None:
        about["reference"] = checksum(reference.module)
    folder = Path(config.output) / "checkpoints"
    checkpoints = Checkpoints(folder, config.must_match() | about, config.keep, config.keep_best)
    if checkpoints.steps() and not config.resume:
        raise CheckpointError(
            f"{config.output} holds a run that is at step {checkpoints.steps()[-1]}. "
            "Resume it (--resume, resume=True), or train into another folder."
        )
    check_processes(checkpoints, model.runtime, steps)
    if checkpoints.steps():
        check_steps(checkpoints, config, steps)
    prompts = sample_prompts(config, model, tok)
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
        prompts=prompts,
    )


def check_objective(settings: RunConfig) -> None:
    """What can be known of an objective before a model is loaded.

    Raises:
        ConfigError: settings that it cannot follow.
        InputError: it needs something that is not given.
    """
    objective = OBJECTIVES[settings.objective]
    for name in objective.needs:
        if not getattr(settings, name):
            flag = f"--{name} {NEEDED[name]}"
            raise InputError(
                f"The objective {settings.objective!r} needs a {name}; say {flag}, or {name}: in "
                "the file."
            )
    objective(settings)


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
        use_dora=config.use_dora,
        dropout=config.lora_dropout,
        init=config.lora_init,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        layers_to_transform=config.layers_to_transform,
        modules_to_save=config.modules_to_save or (),
    )
    check_apart(adapters(tree), relation_of(model))
    return tree


def relation_of(model: Any) -> Relation:
    """Which tensors of its checkpoint the weights of a model live in."""
    abstract, family = described(model.config, without_adapters(model.module))
    return relate(abstract, family.names_of(abstract))


def _tree(reference: Any, objective: Objective) -> Any:
    if reference is None:
        return None
    if not objective.compares:
        raise InputError(
            f"The objective {objective.config.objective!r} compares with no other model; leave "
            "reference out."
        )
    return reference.module
