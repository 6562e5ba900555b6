"""One answer: tokens become text while they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flaxen.model import Model


@dataclass(frozen=True)
class Answer:
    """text: without stop strings; ids: all new tokens; cache: holds prompt and answer."""

    text: str
    ids: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache: Any

    @property
    def prefill_speed(self) -> float | None:
        """Prompt tokens per second until the first new token, compilation included."""
        return self.prompt_tokens / self.prefill_seconds if self.ids else None

    @property
    def decode_speed(self) -> float | None:
        """Tokens per second after the first one."""
        return (len(self.ids) - 1) / self.decode_seconds if len(self.ids) > 1 else None

    def line(self) -> str:
        """What is said on stderr after the text."""
        from flaxen.show import human_bytes, peak_memory

        prompt = _counted("prompt", self.prompt_tokens, self.prefill_speed)
        answer = _counted("answer", len(self.ids), self.decode_speed)
        return f"{prompt} | {answer} | peak memory {human_bytes(peak_memory())}"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        from flaxen.show import peak_memory

        return {
            "text": self.text,
            "tokens": len(self.ids),
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens_per_second": self.prefill_speed,
            "decode_tokens_per_second": self.decode_speed,
            "peak_memory_bytes": peak_memory(),
        }


def _counted(what: str, tokens: int, speed: float | None) -> str:
    return f"{what} {tokens} tokens" + (f", {speed:.1f} tokens/s" if speed else "")


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
) -> Answer:
    """Generate after `ids` and hand text to `write` as soon as it is certain.

    With a cache, `ids` is only what is new since then.
    """
    from flaxen.generate import stream
    from flaxen.text import TextStream

    if not ids:
        raise InputError("The prompt is empty; give at least one token.")
    words, text, new = TextStream(tok, stop=stop), "", []
    start = first = time.perf_counter()
    steps = stream(model, np.array([ids]), max_new_tokens=max_tokens, cache=cache, **sampling)
    for step in steps:
        first = first if new else time.perf_counter()
        new.append(int(step[0]))
        piece = words.push(new[-1])
        text += piece
        write(piece)
        if words.stopped:
            break
    rest = words.finish()
    write(rest)
    now = time.perf_counter()
    return Answer(text + rest, new, len(ids), first - start, now - first, steps.cache)
