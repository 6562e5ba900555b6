"""Everything a run depends on besides the model and the tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.layers.checkpointing import Checkpointing, checkpointing_of

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Lengths are in tokens, `batch_size` in rows of one micro-batch over all
    devices.

    `steps` wins over `epochs`. A step sees batch_size * accumulation rows of `seq_len` tokens.
    `lora_rank` None trains every weight; else adapters of that rank on `lora_targets`.
    `dtype` is what forward and backward compute in; None: as the weights are. Trained weights and
    moments are float32.
    `schedule` is one of `train.optim.SCHEDULES`, after `warmup` steps from 0; `optimizer` one of
    `train.optim.OPTIMIZERS`.
    `remat` computes activations again in the backward pass: True, or a policy of
    `layers.checkpointing.POLICIES`; `remat_every` n does so for every n-th layer.
    `clip` limits the global norm of the gradient; None does not.
    `keep` is how many checkpoints stay; 0 keeps all. `save_every` 0 writes only the last one,
    `eval_every` 0 evaluates before and after.
    `resume` goes on from the last checkpoint in `output`, if there is one.

    Raises:
        ConfigError: naming each setting that is out of range.
    """

    output: str | os.PathLike[str]
    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 4
    accumulation: int = 1
    seq_len: int = 512
    packing: bool = True
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "cosine"
    warmup: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float | None = 1.0
    seed: int = 0
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_targets: str | Sequence[str] | None = None
    lora_rank_stabilised: bool = False
    dtype: str | None = None
    remat: bool | str = False
    remat_every: int = 1
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    resume: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "batch_size": 1,
            "accumulation": 1,
            "seq_len": 2,
            "learning_rate": 0,
            "weight_decay": 0,
            "warmup": 0,
            "eval_every": 0,
            "save_every": 0,
            "keep": 0,
            "remat_every": 1,
        }
        low = [
            f"{name} is {getattr(self, name)!r}, expected at least {bound}"
            for name, bound in least.items()
            if not getattr(self, name) >= bound
        ]
        above_zero = ("steps", "epochs", "eps", "clip", "lora_rank", "lora_alpha")
        low += [
            f"{name} is {getattr(self, name)!r}, expected more than 0"
            for name in above_zero
            if getattr(self, name) is not None and not getattr(self, name) > 0
        ]
        if self.dtype not in (None, "float32", "bfloat16"):
            low.append(f"dtype is {self.dtype!r}, expected float32 or bfloat16")
        if low:
            raise ConfigError(f"Training settings: {'; '.join(low)}.")
        self.checkpointing()

    def checkpointing(self) -> Checkpointing | None:
        """What `remat` asks for; None leaves it to the model."""
        how = checkpointing_of(self.remat)
        return dataclasses.replace(how, every=self.remat_every) if self.remat else None

    def must_match(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the run it goes on from."""
        free = {"output", "eval_every", "save_every", "keep", "resume", "progress"}
        free |= {"remat", "remat_every"}
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in free
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
