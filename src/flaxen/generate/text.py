"""Text in, text out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxen.cache import Cache
from flaxen.core.errors import InputError
from flaxen.generate.stream import Stats, Stream, stream
from flaxen.text import TextStream, encode, encode_chat


@dataclasses.dataclass(frozen=True)
class Result:
    """One answer: its text without stop strings and special tokens, and all its ids.

    `finish_reason` is "stop" for an EOS id or a stop string, else "length".
    """

    text: str
    ids: list[int]
    finish_reason: str
    stream: Stream

    @property
    def stats(self) -> Stats:
        return self.stream.stats

    @property
    def cache(self) -> Cache:
        """What the next turn can go on from; all of `ids` are in it."""
        return self.stream.cache


def text(
    model: Any,
    tok: Any,
    prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[str], object] | None = None,
    cache: Cache | None = None,
    **settings: Any,
) -> Result:
    """Answer a text, chat messages or token ids; it ends at an EOS id, a stop string or the limit.

    `on_text` gets the text piece by piece as it becomes certain; the pieces joined are `.text`.
    With `cache`, the `.cache` of an earlier result, the prompt is only what is new since then.

    Raises:
        InputError: for an empty prompt and as `generate` does.
    """
    ids = _ids(tok, prompt)
    if not ids:
        raise InputError("The prompt has no tokens; expected some text.")
    say = TextStream(tok, stop)
    tokens = stream(model, ids, cache=cache, **settings)
    pieces, new = [], []

    def give(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    for token in tokens:
        new.append(int(token[0]))
        give(say.push(new[-1]))
        if say.stopped:
            break
    give(say.finish())
    return Result("".join(pieces), new, _reason(tokens, say), tokens)


def _reason(tokens: Stream, say: TextStream) -> str:
    if say.stopped:
        tokens.stats.finish_reason[0] = "stop"
    return tokens.stats.finish_reason[0] or "length"


def _ids(tok: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return encode(tok, prompt)
    if len(prompt) and isinstance(prompt[0], Mapping):
        return encode_chat(tok, prompt)
    return list(prompt)
