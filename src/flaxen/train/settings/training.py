"""Everything a run depends on besides the model and the tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flaxen.train.settings.adapter import AdapterSettings, without_rank
from flaxen.train.settings.data import DataSettings, ends_and_rows
from flaxen.train.settings.field import checked, plain, setting
from flaxen.train.settings.learning import LearningSettings
from flaxen.train.settings.objective import ObjectiveSettings
from flaxen.train.settings.policy import PolicySettings
from flaxen.train.settings.saving import SavingSettings
from flaxen.train.settings.scale import ScaleSettings
from flaxen.train.settings.seeing import SeeingSettings
from flaxen.train.settings.unread import unread

Entry = str | os.PathLike[str] | Mapping[str, Any]
Paths = Entry | Sequence[Entry]
"""Files, globs, folders and datasets, as `data.parts.parts_of` takes them."""

GROUPS = (
    ObjectiveSettings,
    PolicySettings,
    DataSettings,
    LearningSettings,
    AdapterSettings,
    ScaleSettings,
    SavingSettings,
    SeeingSettings,
)
"""The subjects, in the order in which people read them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(
    SeeingSettings,
    SavingSettings,
    ScaleSettings,
    AdapterSettings,
    LearningSettings,
    DataSettings,
    PolicySettings,
    ObjectiveSettings,
):
    """How to train; each group of settings is a class of its own.

    Raises:
        ConfigError: naming each setting that is out of range.
    """

    output: str | os.PathLike[str] = setting(
        about="Folder for log, picture, checkpoints and result.", free=True
    )

    def __post_init__(self) -> None:
        checked(self, tuple(self.contradictions()))
        self.checkpointing()
        self.peak()

    def contradictions(self) -> Iterator[str]:
        """What does not go together."""
        yield from ends_and_rows(self)
        yield from without_rank(self)
        yield from unread(self)

    def must_match(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the run it goes on from."""
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if not field.metadata["free"]
        }
