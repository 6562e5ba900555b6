"""Text that appears token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flaxen.core.errors import InputError
from flaxen.text.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BROKEN = "\ufffd"
WINDOW, KEPT = 24, 8
"""Tokens decoded again at each step, at most; and how many of them stay when they are cut down."""


class TextStream:
    """The text of one row of tokens, piece by piece; the pieces joined are `decode` of all its ids.

    A character whose bytes are still on their way is held back, and so is text that may be the
    beginning of a stop string. What comes before a stop string is given, the stop string and all
    after it never; one that is a special token stops at that token. The work is linear in the
    number of tokens.
    """

    def __init__(self, tok: PreTrainedTokenizerFast, stop: Sequence[str] = ()):
        if isinstance(stop, str) or not all(stop):
            raise InputError(f"stop is {stop!r}; expected a list of strings that are not empty.")
        added = tok.added_tokens_decoder
        self._tok = tok
        self._hidden = {i for i, token in added.items() if token.special}
        self._stop_ids = {i for i in self._hidden if added[i].content in stop}
        known = map(tok.backend_tokenizer.token_to_id, (f"<0x{byte:02X}>" for byte in range(256)))
        self._bytes = {i for i in known if i is not None}
        self._window: list[int] = []
        self._shown = 0
        self._hold = _StopSearch(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._hold.stopped

    def push(self, ids: int | Sequence[int] | np.ndarray) -> str:
        """The text that is certain now that these ids have come."""
        text = ""
        for index in np.atleast_1d(ids).tolist():
            if self.stopped:
                break
            text += self._push_one(index)
        return text

    def finish(self) -> str:
        """The rest of the text, once no more ids come."""
        return self._hold.push(self._fresh(last=True)) + self._hold.finish()

    def _push_one(self, index: int) -> str:
        if index in self._stop_ids:
            text = self.finish()
            self._hold.stopped = True
            return text
        if index in self._hidden:
            return ""
        self._window.append(index)
        # A run of byte tokens is decoded as a whole: one byte too few spoils all of it.
        return "" if index in self._bytes else self._hold.push(self._fresh(last=False))

    def _fresh(self, last: bool) -> str:
        text = decode(self._tok, self._window)
        # Only the last broken character can still become a whole one.
        end = len(text) - (not last and text.endswith(BROKEN))
        fresh, self._shown = text[self._shown : end], max(end, self._shown)
        if len(self._window) > WINDOW:
            self._cut(text)
        return fresh

    def _cut(self, text: str) -> None:
        """Forget the front of the window, where what is left decodes to the same text."""
        for kept in range(KEPT, KEPT + 4):
            rest = decode(self._tok, self._window[-kept:])
            if rest and text.endswith(rest):
                self._window = self._window[-kept:]
                self._shown -= len(text) - len(rest)
                return


class _StopSearch:
    """Lets text through, but for stop strings and what may become one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.longest = max(map(len, stops), default=0)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self.held + text
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            # The string that is complete first counts: so the pieces' borders make no difference.
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        keep = next(
            (n for n in range(min(self.longest, len(text)), 0, -1) if self._begins(text[-n:])), 0
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self.held = ("" if self.stopped else self.held), ""
        return rest

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stops)
