"""Functions of the user that say how good completions are."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flaxen.core.errors import ConfigError, InputError, RewardError
from flaxen.train.objectives.rollout import Rollout

OWN = ("prompt", "messages", "completion", "prompts", "completions", "completion_ids")
"""Keys of records that are no columns of their own."""


class Rewards:
    """One reward function or several, called as TRL calls them:

    function(prompts=, completions=, completion_ids=, **columns) -> a number or None for each row.
    Columns are the other keys of the records, a list with one value a row; a function is given
    those that it takes.

    Raises:
        InputError: without a function.
        ConfigError: not one weight for each.
    """

    def __init__(self, given: Any, weights: Sequence[float] | None):
        functions = [given] if callable(given) else list(given or ())
        if not functions or not all(map(callable, functions)):
            raise InputError(
                f"The reward is {given!r}; expected a function (--reward FILE.py:NAME), or a list "
                "of them: reward(prompts, completions, **columns) -> a number for each completion."
            )
        self.weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self.weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(self.weights)} numbers for {len(functions)} reward "
                "functions; expected as many."
            )
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = plain = getattr(function, "__name__", type(function).__name__)
            count = 1
            while name in self.functions:
                count += 1
                name = f"{plain}_{count}"
            self.functions[name] = function

    def __call__(self, rollout: Rollout, when: str) -> np.ndarray:
        """(rows, functions) in float32, NaN for none. when: for errors. Of several processes the
        first asks, and the others are told.

        Raises:
            RewardError: a function raised, or did not give one number or None for each row.
        """
        if jax.process_count() == 1:
            return self._asked(rollout, when)
        from jax.experimental import multihost_utils

        table = np.zeros((len(rollout.ids), len(self.functions)), np.float32)
        error = None
        try:
            table = self._asked(rollout, when) if jax.process_index() == 0 else table
        except RewardError as caught:
            error = caught
        told = multihost_utils.broadcast_one_to_all((np.float32(error is not None), table))
        if error is not None:
            raise error
        if told[0]:
            raise RewardError(f"The reward of {when} failed on the first process, which says why.")
        return np.asarray(told[1])

    def _asked(self, rollout: Rollout, when: str) -> np.ndarray:
        given = {
            "prompts": [one.prompt for one in rollout.asked],
            "completions": rollout.completions,
            "completion_ids": rollout.ids,
        }
        keys = {key for one in rollout.asked for key in one.fields if key not in OWN}
        given |= {key: [one.fields.get(key) for one in rollout.asked] for key in sorted(keys)}
        columns = [
            _numbers(name, function, given, len(rollout.ids), when)
            for name, function in self.functions.items()
        ]
        return np.stack(columns, axis=1)


def _numbers(
    name: str, function: Callable[..., Any], given: Mapping[str, Any], rows: int, when: str
) -> np.ndarray:
    """What a function says of each row, (rows,) in float32."""
    said = f"The reward function {name!r}, asked for {when},"
    try:
        # A copy, so that nothing it does to them reaches the next one.
        found = function(**copy.deepcopy(_taken(function, given)))
        values = list(found)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{said} failed: {type(error).__name__}: {error}") from error
    if len(values) != rows:
        raise RewardError(
            f"{said} gave {len(values)} rewards for {rows} completions; expected one for each."
        )
    return np.array([_number(said, i, value) for i, value in enumerate(values)], np.float32)


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some that are written in C
        return dict(given)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {key: value for key, value in given.items() if key in parameters}


def _number(said: str, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except Exception:  # a value of the user's own may raise anything
        number = math.nan
    if isinstance(value, str) or not abs(number) <= float(np.finfo(np.float32).max):
        raise RewardError(
            f"{said} gave {value!r} for completion {row}; expected a finite number, or None where "
            "it says nothing."
        )
    return number
