"""Documents cut into examples that fit into a row."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.progress import Progress
from flaxen.layers.cross_entropy import IGNORED
from flaxen.train.data.records import Record
from flaxen.train.data.tokens import Tokens, tokens_of

LOG = logging.getLogger(__name__)


class Example(NamedTuple):
    """ids and labels, int32 (n,), unshifted; a label is its id or -100."""

    ids: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Pieces of documents: of example i `tokens.ids[starts[i]:stops[i]]`. overlong: how many chats
    and completions did not fit.
    """

    tokens: Tokens
    starts: np.ndarray
    stops: np.ndarray
    overlong: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: Any) -> Any:
        piece = slice(int(self.starts[i]), int(self.stops[i]))
        ids = np.asarray(self.tokens.ids[piece])
        return Example(ids, np.where(self.tokens.learned[piece], ids, IGNORED).astype(np.int32))

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts

    def fingerprint(self) -> str:
        """A hash of all tokens, and of what they are cut into."""
        cuts = hashlib.sha256(self.starts.tobytes() + self.stops.tobytes())
        return self.tokens.digest + cuts.hexdigest()


def tokenise(
    tok: Any,
    records: Iterable[Record],
    seq_len: int,
    *,
    train_on: str = "assistant",
    overlong: str = "cut",
    cache: str = "none",
    progress: Progress = False,
) -> Examples:
    """Examples of at most `seq_len` tokens, as `encoded` makes tokens and `cut` cuts them.

    Raises:
        InputError: for a chat that the template refuses, with its file and line; when no example
            has a target.
    """
    tokens = tokens_of(tok, records, train_on=train_on, cache=cache, progress=progress)
    examples = cut(tokens, seq_len, overlong)
    if not len(examples):
        raise InputError(
            f"None of the {len(tokens.splits)} examples has a target within seq_len={seq_len} "
            "tokens. Use a longer seq_len, or look at what the chat template renders."
        )
    tell_overlong(examples.overlong, len(tokens.splits), seq_len, overlong)
    return examples


def tell_overlong(count: int, total: int, seq_len: int, overlong: str) -> None:
    """A warning, if anything was longer than a row."""
    if count:
        what = "left out" if overlong == "drop" else "cut"
        LOG.warning(
            "%d of %d chats and completions are longer than seq_len=%d and were %s (overlong=%s).",
            *(count, total, seq_len, what, overlong),
        )


def cut(tokens: Tokens, seq_len: int, overlong: str = "cut") -> Examples:
    """A text that is longer than a row becomes several examples, each starting with the last token
    of the one before, so that every token is predicted once. Another document is cut at `seq_len`
    or, if overlong is `drop`, left out. So is what has no target.
    """
    lengths = np.diff(tokens.bounds)
    pieces = np.where(tokens.splits, np.maximum(-(-(lengths - 1) // (seq_len - 1)), 1), 1)
    too_long = ~tokens.splits & (lengths > seq_len)
    if overlong == "drop":
        pieces = np.where(too_long, 0, pieces)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = tokens.bounds[owner] + nth * (seq_len - 1)
    stops = np.minimum(starts + seq_len, tokens.bounds[owner + 1])
    kept = _learned(tokens.learned, starts, stops)
    return Examples(tokens, starts[kept], stops[kept], int(too_long.sum()))


def _learned(learned: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Which pieces have a target: a token that is learned and not their first, which nothing before
    it could predict.
    """
    several = stops - starts > 1
    edges = np.stack([starts + 1, stops], 1)[several].ravel()
    found = np.zeros(len(starts), bool)
    if len(edges):
        # An edge at the very end of all tokens must not be said, and need not.
        edges = edges[:-1] if edges[-1] == len(learned) else edges
        found[several] = np.logical_or.reduceat(learned, edges)[::2]
    return found
