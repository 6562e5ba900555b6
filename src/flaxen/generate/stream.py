"""Generation token by token; what a conversation said so far can be kept."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flaxen.cache import Cache, fits
from flaxen.generate.buckets import bucket
from flaxen.generate.loop import Step, advance, begin, programs, stretches
from flaxen.generate.prompt import Prompt, read_prompt
from flaxen.generate.sampling import Sampling
from flaxen.generate.settings import Settings, resolve
from flaxen.layers.runtime import RINGS
from flaxen.models.skeleton import only_generating
from flaxen.models.switch import same_side
from flaxen.shard import on_host


@dataclasses.dataclass
class Stats:
    """Counts and finish reasons are per row; `finish_reason` is None while a row goes on.

    A row that ends with an EOS id has finished with "stop", even where that was the last token
    allowed; else with "length".
    `compiled` says that the seconds contain compiling, as the first use of a size does.
    """

    prompt_tokens: list[int]
    new_tokens: list[int]
    finish_reason: list[str | None]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compiled: bool = False

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows after the first ones, by the time that they took."""
        later = sum(self.new_tokens) - len(self.new_tokens)
        return later / self.decode_seconds if self.decode_seconds else 0.0


class Stream(Iterator[np.ndarray]):
    """Yields the newest token ids, (B,) int32, the pad id in rows that are finished.

    The next step is on its way to the device before the current tokens are read.
    """

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        settings: Settings,
        sampling: Sampling,
        cache: Cache | None,
    ):
        rows = len(prompt.ids)
        self.stats = Stats(prompt.lengths.tolist(), [0] * rows, [None] * rows)
        self._model, self._sampling, self._limit = model, sampling, settings.max_new_tokens
        self._settings, self._prompt = settings, prompt
        fresh = stretches(model.module, prompt, self._limit)
        self._stretches = fresh if cache is None else [self._limit]
        self._yielded: list[Step] = []
        self._count, self._over, self._behind = 0, False, False
        self._started, self._programs = time.perf_counter(), programs()
        self._cache, self._step = begin(model, prompt, settings, sampling, cache)

    def __next__(self) -> np.ndarray:
        if self._over:
            raise StopIteration
        step = self._step
        self._count += 1
        if len(self._stretches) > 1:
            self._yielded.append(step)
        self._behind = self._count == self._limit
        if not self._behind:
            self._advance()
        token, live, goes_on = on_host((step.token, step.live, step.open))
        self._note(live, goes_on)
        return token

    @property
    def cache(self) -> Cache:
        """The prompt and all tokens yielded, for the next turn; taking it ends the stream."""
        self._over = True
        if self._behind:
            self._behind = False
            self._advance()
        return self._cache

    def _advance(self) -> None:
        model = self._model
        if self._count == self._stretches[0] and len(self._stretches) > 1:
            self._read_anew()
            return
        self._cache, self._step = advance(
            model.module, self._cache, self._step, self._sampling, runtime=model.runtime
        )

    def _read_anew(self) -> None:
        """The next tokens by way of a new cache: past this length every key is another."""
        tokens, live = (
            np.stack(on_host([getattr(step, x) for step in self._yielded]), axis=1)
            for x in ("token", "live")
        )
        self._cache, self._step = begin(
            self._model,
            self._prompt.longer(tokens, live),
            self._settings,
            self._sampling,
            after=self._yielded[-1],
        )
        self._stretches, self._yielded = self._stretches[1:], []

    def _note(self, live: np.ndarray, goes_on: np.ndarray) -> None:
        stats, seconds = self.stats, time.perf_counter() - self._started
        stats.compiled = programs() > self._programs
        if self._count == 1:
            stats.prefill_seconds = seconds
        else:
            stats.decode_seconds = seconds - stats.prefill_seconds
        last = self._count == self._limit
        self._over = last or not goes_on.any()
        for row in np.flatnonzero(live):
            stats.new_tokens[row] += 1
            if not goes_on[row] or last:
                stats.finish_reason[row] = "length" if goes_on[row] else "stop"


def stream(
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    cache: Cache | None = None,
    **settings: Any,
) -> Stream:
    """`generate`, token by token; equal settings give equal tokens.

    With `cache`, the `.cache` of an earlier stream, the conversation goes on: `input_ids` are only
    what is new since then. It is made larger where that is needed, and stays usable itself.
    `max_length` counts what is in it; the repetition penalty does not.

    Raises:
        CacheError: for a cache of another model or of another number of rows.
        InputError: as `generate` does.
    """
    only_generating(model.module, "generate")
    prompt = read_prompt(input_ids, attention_mask, model.module.embed_tokens.vocab_size)
    used = 0 if cache is None else int(cache.index)
    asked = resolve(model, used + prompt.ids.shape[1], settings)
    if cache is not None:
        same_side(model.module, cache, prompt.lengths + asked.max_new_tokens - 1)
        slots = bucket(int(prompt.lengths.max()))
        cache = _roomy(model, cache, len(prompt.ids), used + slots + asked.room)
    return Stream(model, prompt, asked, asked.traced(model.runtime), cache)


def _roomy(model: Any, cache: Cache, rows: int, slots: int) -> Cache:
    fits(cache, jax.eval_shape(lambda: model.module.init_cache(rows, 1, runtime=RINGS)))
    return cache if slots <= cache.capacity else cache.grown(bucket(slots))
