"""A run from one file: the settings of training, and where model and data come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.train.settings.field import names_in, setting
from flaxen.train.settings.fitting import fitted
from flaxen.train.settings.training import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """What `flaxen train` needs: `TrainConfig`, model, data and how they are loaded.

    Raises:
        ConfigError: naming each setting that is out of range.
    """

    output: str = setting(
        "runs/train", "Folder for log, picture, checkpoints and result.", free=True
    )
    model: str = setting(about="A Hugging Face folder, a hub id or a file of weights.", flag=False)
    data: str | Sequence[str | Mapping[str, Any]] = setting(
        about="Files, globs, folders, hf:owner/name; or {path: ..., weight: ...}.", flag=False
    )
    eval_data: str | Sequence[str | Mapping[str, Any]] | None = setting(
        None, "Like data, to test on.", free=True, flag=list[str]
    )
    fresh: bool = setting(False, "Random weights: of the model only its config is read.")
    task: str | None = setting(
        None, "Another head than the checkpoint has: sequence-classification."
    )
    num_labels: int = setting(2, "Of that head.", least=1)
    tokenizer: str | None = setting(None, "Of another folder or hub id than the model's.")
    reference: str | None = setting(None, "The model that an objective compares with: a teacher.")
    reward: str | Sequence[str] | None = setting(
        None, "FILE.py:NAME of the function that an objective asks, or several.", flag=list[str]
    )
    mesh: str | None = setting(None, "Devices by axis, for example fsdp=2,tp=4.", free=True)
    plan: str | None = setting(
        None,
        "How weights are cut along the mesh; default: auto.",
        choices=names_in("flaxen.shard.plan:PLANS"),
        free=True,
    )
    attention: str = setting(
        "auto",
        "By which mechanism.",
        choices=names_in("flaxen.attention:MECHANISMS", "auto"),
        free=True,
    )
    load_dtype: str | None = setting(
        None, "What frozen weights are kept in; default: as stored. Trained ones are float32."
    )
    bits: str | int | None = setting(
        None,
        "Frozen weights, under adapters, are rounded: to integers of so many bits, or to the 4-bit "
        "normal floats of QLoRA.",
        choices=(8, 4, "nf4"),
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub id.")
    coordinator: str | None = setting(
        None, "Of several processes: HOST:PORT of the first, or auto.", free=True
    )
    num_processes: int | None = setting(None, "How many there are.", least=1, free=True)
    process_id: int | None = setting(None, "Which one this is, from 0.", least=0, free=True)

    def contradictions(self) -> Iterator[str]:
        """What of a run does not go together."""
        yield from super().contradictions()
        if self.num_labels != RunConfig.num_labels and self.task is None:
            yield (
                f"num_labels is {self.num_labels}, which nothing reads without another head; say "
                "task: sequence-classification"
            )
        if self.task is not None and self.fresh:
            yield "task is not read with fresh; say it by the architectures of the config"
        if self.bits is not None and self.lora_rank is None:
            yield f"bits is {self.bits}, which rounds weights under adapters alone; say lora_rank"

    def training(self) -> TrainConfig:
        """The settings of training alone."""
        names = [field.name for field in dataclasses.fields(TrainConfig)]
        return TrainConfig(**{name: getattr(self, name) for name in names})


def run_config(values: Mapping[str, Any], where: str = "The settings") -> RunConfig:
    """A run of settings by name, as a file or flags have them.

    Raises:
        ConfigError: naming every unknown key, every value of a wrong kind, and what lacks.
    """
    given = fitted(RunConfig, values, where)
    lacking = [
        field.name
        for field in dataclasses.fields(RunConfig)
        if field.default is dataclasses.MISSING and field.name not in given
    ]
    if lacking:
        raise ConfigError(f"{where}: {' and '.join(lacking)} must be given.")
    return RunConfig(**given)
