"""Prompts that a model is asked in training: a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.train.data.answers import prompt_tokens
from flaxen.train.data.order import Order
from flaxen.train.data.records import Record


@dataclasses.dataclass(frozen=True)
class Asked:
    """prompt: a string, or messages; ids: its tokens; fields: of its record."""

    prompt: Any
    ids: list[int]
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """All batches of prompts, which are named by their places from `start` on. counts: prompts of
    each part of a mixture, which are taken in proportion to `weights`.
    """

    asked: Sequence[Asked]
    start: int
    size: int
    seed: int
    counts: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None

    @functools.cached_property
    def order(self) -> Order:
        """Which prompts a step has."""
        return Order(self.counts or (len(self.asked),), self.seed, self.size, self.weights)

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.order.per_epoch

    def mixed(self, others: Sequence[Prompts], weights: Sequence[float]) -> Prompts:
        """One source of this and others, whose places follow on, by weight."""
        every = (self, *others)
        return dataclasses.replace(
            self,
            asked=[one for source in every for one in source.asked],
            counts=tuple(len(source.asked) for source in every),
            weights=tuple(weights),
        )

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """`prompt` (size,): places, -1 where the epoch has no more."""
        places = np.full(self.size, -1)
        chosen = self.order.rows(step)
        places[: len(chosen)] = self.start + np.asarray(chosen)
        return {"prompt": places}

    def fingerprint(self) -> str:
        """A hash of every prompt, and of all that reward functions are told of it."""
        told = [[one.ids, one.fields] for one in self.asked]
        words = json.dumps([self.order.probe(), self.weights, told], sort_keys=True, default=str)
        return hashlib.sha256(words.encode()).hexdigest()[:16]


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
