"""Prompts of any padding, read once on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.models.sight import Sight


@dataclasses.dataclass(frozen=True)
class Prompt:
    """ids: (B, T) int32 as given. Without the padding, rows are (B, width), real tokens last.
    sight: its pictures.
    """

    ids: np.ndarray
    mask: np.ndarray
    sight: Sight | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row."""
        return self.mask.sum(1)

    def longer(self, tokens: np.ndarray, live: np.ndarray) -> Prompt:
        """With more tokens (B, n) after it, of which `live` ones are real."""
        return Prompt(np.hstack([self.ids, tokens]), np.hstack([self.mask, live]))

    def laid(self, slots: int) -> tuple[np.ndarray, np.ndarray, int]:
        """ids and mask, both (B, slots), and the width: where each row's real tokens end.

        Whatever padding a prompt came with, none is left inside a row, and none of its ids are
        used.
        """
        width = int(self.lengths.max())
        order = self._order(width)
        after = [(0, 0), (0, slots - width)]
        mask = np.take_along_axis(self.mask, order, 1)
        ids = np.where(mask, np.take_along_axis(self.ids, order, 1), 0)
        return np.pad(ids, after), np.pad(mask, after), width

    def laid_sight(self, slots: int) -> Sight | None:
        """The pictures of the prompt, in the slots that `laid` gives it."""
        order = self._order(int(self.lengths.max()))
        return None if self.sight is None else self.sight.laid(order, slots)

    def _order(self, width: int) -> np.ndarray:
        return np.argsort(self.mask, axis=1, kind="stable")[:, -width:]


def read_prompt(input_ids: Any, attention_mask: Any, vocab: int) -> Prompt:
    """Lists, NumPy or jax arrays, (T,) or (B, T).

    Raises:
        InputError: for what is not a table of token ids with at least one real token in each row.
    """
    ids = _table(input_ids, "input_ids")
    if ids.size == 0:
        raise InputError("The prompt is empty; expected at least one token, for example BOS.")
    if ids.dtype.kind not in "iu":
        raise InputError(f"input_ids are {ids.dtype}; expected whole numbers (token ids).")
    mask = _mask(attention_mask, ids)
    empty = np.flatnonzero(~mask.any(1))
    if empty.size:
        raise InputError(
            f"attention_mask leaves no token in row {empty[0]}; expected at least one, for example "
            "BOS."
        )
    wrong = mask & ((ids < 0) | (ids >= vocab))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InputError(
            f"input_ids[{row}, {column}] is {ids[row, column]}; expected 0 to {vocab - 1}. "
            "Use the tokenizer of this model."
        )
    return Prompt(ids.astype(np.int32), mask)


def _mask(attention_mask: Any, ids: np.ndarray) -> np.ndarray:
    if attention_mask is None:
        return np.ones(ids.shape, bool)
    mask = _table(attention_mask, "attention_mask")
    if mask.shape != ids.shape:
        raise InputError(
            f"attention_mask has shape {mask.shape} and input_ids {ids.shape}; expected the same."
        )
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask has values besides 0 (padding) and 1 (token).")
    return mask.astype(bool)


def _table(values: Any, name: str) -> np.ndarray:
    try:
        table = np.asarray(values)
    except ValueError as error:
        raise InputError(
            f"{name} has rows of different lengths; pad them, and say where in attention_mask."
        ) from error
    if table.ndim not in (1, 2):
        raise InputError(f"{name} has shape {table.shape}; expected (T,) or (B, T).")
    return np.atleast_2d(table)
