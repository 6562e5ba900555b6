"""Which tokens a checkpoint forbids, or asks for, at the beginning, at the end, and anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.tree import module
from flaxen.shard import Placement, everywhere

NAMES = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")


@module
class Rules:
    """Which tokens may be chosen, (V,) of bool each: at every place, at the first, at the last."""

    always: jax.Array
    first: jax.Array
    last: jax.Array

    def __call__(self, logits: jax.Array, count: jax.Array, limit: jax.Array) -> jax.Array:
        """Scores (B, V), -inf for tokens that may not come after `count` of at most `limit`."""
        may = self.always & (self.first | (count > 0)) & (self.last | (count < limit - 1))
        return jnp.where(may, logits, -jnp.inf)


def rules(
    vocab: int, asked: Mapping[str, Any], stored: Mapping[str, Any], placement: Placement | None
) -> Rules:
    """Rules by Hugging Face's names (`NAMES`): arguments over what the checkpoint says.

    Raises:
        InputError: for an argument that names no tokens.
    """
    found = {}
    for name in NAMES:
        given = asked.get(name)
        try:
            found[name] = _tokens(name, stored.get(name) if given is None else given, vocab)
        except InputError:
            if given is not None:
                raise
            # A strange value in a file must not keep the model from running.
            found[name] = []
    every = np.ones(vocab, bool)
    but = lambda name: ~np.isin(np.arange(vocab), found[name])
    only = lambda name: every if not found[name] else ~but(name)
    masks: dict[str, Any] = {
        "always": but("suppress_tokens"),
        "first": but("begin_suppress_tokens") & only("forced_bos_token_id"),
        "last": only("forced_eos_token_id"),
    }
    return everywhere(Rules(**masks), placement)


def _tokens(name: str, value: Any, vocab: int) -> list[int]:
    """-1 stands for none, in older files."""
    several = value if isinstance(value, list | tuple | np.ndarray) else [value]
    ids = [x for x in several if x is not None and not (isinstance(x, int) and x == -1)]
    if not all(isinstance(x, int | np.integer) and 0 <= x < vocab for x in ids):
        raise InputError(f"{name} is {value!r}; expected token ids from 0 to {vocab - 1}.")
    return [int(x) for x in ids]
