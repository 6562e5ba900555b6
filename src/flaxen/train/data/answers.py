"""Prompts and their answers as tokens: strings, or conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.text import encode_chat, render_with_mask
from flaxen.train.data.encoding import prompt_and_answer
from flaxen.train.data.records import Record


class Answered(NamedTuple):
    """Token ids of a prompt and of an answer, and which of the answer's are learned."""

    prompt: list[int]
    answer: list[int]
    learned: list[bool]

    def row(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and targets, each at the slot that predicts it, cut at `length`: int32."""
        ids = np.asarray([*self.prompt, *self.answer], np.int32)[:length]
        learned = np.asarray([*[False] * len(self.prompt), *self.learned])[:length]
        targets = np.full(len(ids), IGNORED, np.int32)
        targets[:-1] = np.where(learned[1:], ids[1:], IGNORED)
        return ids, targets


def answered(tok: Any, prompt: Any, answer: Any) -> Answered:
    """Of strings all of the answer is learned, of messages what the assistant says in it.

    Raises:
        InputError: a chat that the template refuses.
    """
    if isinstance(answer, str):
        before, after = prompt_and_answer(tok, prompt, answer)
        return Answered(before, after, [True] * len(after))
    ids, mask = render_with_mask(tok, [*prompt, *answer])
    # The answer begins where the template would let the assistant begin.
    start = alike(encode_chat(tok, prompt) if prompt else [], ids)
    return Answered(ids[:start], ids[start:], [bool(x) for x in mask[start:]])


def prompt_tokens(tok: Any, prompt: Any, tools: Sequence[Any] | None = None) -> list[int]:
    """Token ids of a string, or of messages up to where the assistant begins.

    Raises:
        InputError: a chat that the template refuses.
    """
    if isinstance(prompt, str):
        return prompt_and_answer(tok, prompt, "")[0]
    return encode_chat(tok, prompt, tools=tools)


def alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many of the first things are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def both_answers(tok: Any, record: Record) -> tuple[Answered, Answered]:
    """The chosen and the rejected one; without a prompt, it is what they begin with alike.

    Raises:
        InputError: with file and line: answers that do not differ, or that the template refuses.
    """
    fields = record.fields
    chosen, rejected = fields["chosen"], fields["rejected"]
    if "prompt" in fields:
        prompt = fields["prompt"]
    else:
        prompt = _implied(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not chosen or not rejected:
        raise InputError(
            f"{record.where}: 'chosen' and 'rejected' do not differ, or one is the other's "
            "beginning; expected two answers to one prompt."
        )
    try:
        return answered(tok, prompt, chosen), answered(tok, prompt, rejected)
    except InputError as error:
        raise InputError(f"{record.where}: {error}") from error


def _implied(chosen: Any, rejected: Any) -> Any:
    """Strings are cut before a word, not inside of one."""
    if not isinstance(chosen, str):
        return chosen[: alike(chosen, rejected)]
    start = alike(chosen, rejected)
    return chosen[: start - 1 if chosen[:start].endswith(" ") else start]
