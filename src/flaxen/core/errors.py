"""Errors that say what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlaxenError(ValueError):
    """Something the user can mend."""


class ConfigError(FlaxenError):
    """A configuration that cannot be followed exactly."""


class CheckpointError(FlaxenError):
    """A checkpoint that is damaged, incomplete or does not fit the model."""


class PlanError(FlaxenError):
    """A mesh or a plan that cannot be laid out."""


class InputError(FlaxenError):
    """Inputs whose shapes or values do not fit together."""


class RewardError(FlaxenError):
    """A reward function that failed, or gave no rewards."""


class CacheError(FlaxenError):
    """More tokens than a cache was made for."""


def did_you_mean(word: str, known: Iterable[str], most: int = 200) -> str:
    """' Did you mean ...?' for the nearest known word, or the list of known ones; nothing where
    there are more than `most`.
    """
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(known)}." if 0 < len(known) <= most else ""
