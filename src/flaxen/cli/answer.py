"""One answer: tokens become text while they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flaxen.generate import Stream
    from flaxen.model import Model


@dataclass(frozen=True)
class Answer:
    """text: without stop strings; ids: all new tokens; stream: the finished one, with its cache."""

    text: str
    ids: list[int]
    stream: Stream

    def as_dict(self) -> dict[str, Any]:
        """For --json. Speeds are in tokens per second; the first use of a shape compiles, too."""
        from flaxen.show import peak_memory

        stats = self.stream.stats
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "prompt_tokens": stats.prompt_tokens[0],
            "finish_reason": stats.finish_reason[0] or "stop",
            "prefill_speed": stats.prompt_tokens[0] / stats.prefill_seconds,
            "decode_speed": stats.tokens_per_second or None,
            "with_compiling": stats.compiled,
            "peak_memory_bytes": peak_memory(),
        }

    def line(self) -> str:
        """What is said on stderr after the text."""
        from flaxen.show import human_bytes

        told = self.as_dict()
        pieces = [
            f"prompt {told['prompt_tokens']} tokens, {told['prefill_speed']:.1f} tokens/s",
            f"answer {told['tokens']} tokens",
            f"peak memory {human_bytes(told['peak_memory_bytes'])}",
        ]
        if told["decode_speed"]:
            pieces[1] += f", {told['decode_speed']:.1f} tokens/s"
        if told["with_compiling"]:
            pieces.append("the first use of a length also compiles")
        return " | ".join(pieces)


def answer(
    model: Model,
    tok: PreTrainedTokenizerFast,
    ids: Sequence[int],
    *,
    max_tokens: int,
    sampling: dict[str, Any],
    stop: Sequence[str] = (),
    write: Callable[[str], object] = lambda text: None,
    cache: Any = None,
    pictures: Mapping[str, Any] = MappingProxyType({}),
) -> Answer:
    """Generate after `ids` and hand text to `write` as soon as it is certain.

    With a cache, `ids` is only what is new since then. pictures: the arrays of those in `ids`.
    """
    from flaxen.generate import stream
    from flaxen.text import TextStream

    if not ids:
        raise InputError("The prompt is empty; give at least one token.")
    words, text, new = TextStream(tok, stop=stop), "", []
    more = {**sampling, **pictures}
    steps = stream(model, np.array([ids]), cache=cache, max_new_tokens=max_tokens, **more)
    for step in steps:
        new.append(int(step[0]))
        piece = words.push(new[-1])
        text += piece
        write(piece)
        if words.stopped:
            break
    rest = words.finish()
    write(rest)
    return Answer(text + rest, new, steps)
