"""Prompts that a model is asked in training: a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.train.data.answers import prompt_tokens
from flaxen.train.data.packing import order
from flaxen.train.data.records import Record


@dataclasses.dataclass(frozen=True)
class Asked:
    """prompt: a string, or messages; ids: its tokens; fields: of its record."""

    prompt: Any
    ids: list[int]
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """All batches of prompts, which are named by their places from `start` on."""

    asked: Sequence[Asked]
    start: int
    size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.asked) // self.size)

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """`prompt` (size,): places, -1 where the epoch has no more."""
        epoch, within = divmod(step, self.per_epoch)
        places = np.full(self.size, -1)
        chosen = order(self.seed, epoch, len(self.asked))[within * self.size :][: self.size]
        places[: len(chosen)] = self.start + chosen
        return {"prompt": places}

    def fingerprint(self) -> str:
        """A hash of every prompt, and of all that reward functions are told of it."""
        told = [[one.ids, one.fields] for one in self.asked]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def asked(tok: Any, records: Sequence[Record], most: int) -> list[Asked]:
    """The prompts of records.

    Raises:
        InputError: with file and line: a prompt of more than `most` tokens, or of none, or one that
            the template refuses.
    """
    found = []
    for record in records:
        fields = record.fields
        prompt = fields["prompt"] if "prompt" in fields else fields["messages"]
        try:
            ids = prompt_tokens(tok, prompt, fields.get("tools"))
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from error
        if not 1 <= len(ids) <= most:
            raise InputError(
                f"{record.where}: the prompt has {len(ids)} tokens; expected 1 to {most}, which "
                "is seq_len without max_completion_length. Use a longer seq_len, or leave it out."
            )
        found.append(Asked(prompt, ids, fields))
    return found
