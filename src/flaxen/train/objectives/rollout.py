"""Completions that a model samples with the weights it has, and their rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from flaxen.generate import generate
from flaxen.generate.buckets import bucket
from flaxen.generate.settings import resolve
from flaxen.layers.cross_entropy import IGNORED
from flaxen.text import decode
from flaxen.train.data.prompts import Asked


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Of each row its prompt, the tokens that came after it up to the one that ended it, their
    text, and whether nothing ended it.
    """

    asked: list[Asked]
    ids: list[list[int]]
    texts: list[str]
    truncated: np.ndarray

    @property
    def completions(self) -> list[Any]:
        """Strings, or the assistant's message where the prompt is messages."""
        return [
            text if isinstance(one.prompt, str) else [{"role": "assistant", "content": text}]
            for one, text in zip(self.asked, self.texts, strict=True)
        ]

    def first(self, count: int) -> Rollout:
        """Its first rows alone."""
        return Rollout(
            self.asked[:count], self.ids[:count], self.texts[:count], self.truncated[:count]
        )


def sampled(model: Any, tok: Any, asked: list[Asked], config: Any, seed: int) -> Rollout:
    """One completion for each, a function of weights, prompts, settings and seed.

    A row ends at the tokenizer's EOS or at one of the checkpoint's, and keeps it.
    """
    ids = np.zeros((len(asked), max(len(one.ids) for one in asked)), np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, one in enumerate(asked):
        ids[i, : len(one.ids)], mask[i, : len(one.ids)] = one.ids, True
    ends = {*resolve(model, 1, {"max_new_tokens": 1}).eos_token_id}
    ends |= set() if tok.eos_token_id is None else {tok.eos_token_id}
    # What the checkpoint likes to sample with would make another policy than the one that learns.
    plain = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    found = generate(
        model,
        ids,
        mask,
        do_sample=True,
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_completion_length,
        eos_token_id=sorted(ends),
        seed=seed,
        **plain,
    )
    new = found[:, ids.shape[1] :]
    ended = np.isin(new, list(ends))
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, new.shape[1])
    tokens = [row[:n].tolist() for row, n in zip(new, lengths, strict=True)]
    truncated = np.logical_not(ended.any(1))
    return Rollout(asked, tokens, [decode(tok, row) for row in tokens], truncated)


def rows(rollout: Rollout, learned: np.ndarray, longest: int) -> dict[str, np.ndarray]:
    """ids and targets, (rows, T) each, T in sizes that other steps share; targets only of rows that
    are `learned`.
    """
    lengths = [len(a.ids) + len(b) for a, b in zip(rollout.asked, rollout.ids, strict=True)]
    shape = len(lengths), min(bucket(max(lengths)), longest)
    ids, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    for i, (one, answer) in enumerate(zip(rollout.asked, rollout.ids, strict=True)):
        ids[i, : lengths[i]] = [*one.ids, *answer]
        if learned[i]:
            targets[i, len(one.ids) - 1 : lengths[i] - 1] = answer
    return {"ids": ids, "targets": targets}


def seed_of(*numbers: int) -> int:
    """A seed of its own for each tuple of numbers."""
    return int(np.random.SeedSequence([n % 2**64 for n in numbers]).generate_state(1)[0])
