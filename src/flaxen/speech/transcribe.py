"""What is said in a piece of audio of any length, window by window."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.progress import Progress, reporting
from flaxen.generate.answering import Begun, begin, encode, say, stored
from flaxen.generate.buckets import bucket
from flaxen.generate.rules import Rules, rules
from flaxen.generate.settings import resolve
from flaxen.models.audio import AudioEncoder
from flaxen.shard import on_host
from flaxen.speech.audio import RATE, RATES, read_wav, resampled
from flaxen.speech.spectrogram import HOP, log_mel
from flaxen.speech.timestamps import Piece, TimestampRule, pieces, rule
from flaxen.speech.words import Words, words_of
from flaxen.text import decode

SHORTEST = 10
"""Frames that are listened to at least: a tenth of a second holds no word."""
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclasses.dataclass(frozen=True)
class Segment:
    """What was said from `start` to `end`, in seconds. avg_logprob: mean of the window's tokens;
    no_speech_prob: how likely nobody speaks in it; temperature: at which it was drawn.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float


@dataclasses.dataclass(frozen=True)
class Transcript:
    """What was said. language: its code, as asked for or heard; seconds: of the audio."""

    text: str
    language: str | None
    seconds: float
    segments: list[Segment]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Trust:
    """When a window is heard again at the next temperature, and when it is taken for silence.

    Tokens less likely than `logprob` on average are not trusted, nor is a text that shrinks by more
    than `compression` when compressed, as repetition does; a window that is silence with more than
    `no_speech` and not trusted is left out.
    """

    logprob: float = -1.0
    compression: float = 2.4
    no_speech: float = 0.6


@dataclasses.dataclass(frozen=True)
class Heard:
    """What one window holds."""

    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float


def transcribe(
    model: Any,
    audio: str | Path | np.ndarray,
    *,
    rate: int = RATE,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    temperatures: Sequence[float] = TEMPERATURES,
    trust: Trust = Trust(),
    max_new_tokens: int | None = None,
    tokenizer: Any = None,
    progress: Progress = True,
) -> Transcript:
    """What Whisper hears in a WAV file, or in samples (T,) from -1 to 1, `rate` a second.

    language: a code or an English name; None listens for it. task: "transcribe", or "translate"
    into English. timestamps: ask for times within a short piece of audio too; what is longer than a
    window (30 s) always has some, as they say where the next window begins.
    temperatures: the first is used, each other only where the one before was not to be trusted.

    Raises:
        InputError: for a model that does not hear, files that are no audio, unknown languages.
    """
    if not isinstance(getattr(model.module, "encoder", None), AudioEncoder):
        raise InputError(f"This model is {model.module.kind()} of text; expected Whisper.")
    samples = _samples(audio, rate)
    tok = _tokenizer(model) if tokenizer is None else tokenizer
    words = words_of(model, tok)
    language = words.checked(language, task)
    window = model.module.encoder.frames
    timed = timestamps or len(samples) > window * HOP
    frames = _spectrogram(samples, window, model.config.num_mel_bins)
    ear = Ear(model, tok, words, tuple(temperatures), trust, max_new_tokens)
    if language is None and words.languages:
        language = ear.language(frames[:, :window])
    prompt, content = words.prompt(language, task, timed), -(-len(samples) // HOP)
    segments: list[Segment] = []
    at = 0
    with reporting(progress, "Transcribing", content * HOP // RATE, unit="seconds") as report:
        while content - at >= SHORTEST or at == 0:
            length = min(window, content - at)
            heard = ear.hear(frames[:, at : at + window], prompt, timed)
            found, moved = ear.pieces(heard, length * HOP / RATE, timed)
            segments += list(_segments(found, heard, at * HOP / RATE, words, tok))
            # A window that says to begin again where it began is over.
            step = round(moved * RATE / HOP)
            step = step if 0 < step <= length else length
            at += step
            if report:
                report(step * HOP // RATE)
    text = "".join(segment.text for segment in segments)
    return Transcript(text, language, len(samples) / RATE, segments)


def _samples(audio: Any, rate: int) -> np.ndarray:
    """At 16 kHz."""
    if isinstance(audio, str | Path):
        audio, rate = read_wav(audio)
    audio = np.asarray(audio)
    if audio.ndim != 1 or audio.dtype.kind != "f" or not np.isfinite(audio).all():
        raise InputError(
            f"audio is {audio.dtype} of shape {audio.shape}; expected a WAV file, or finite floats "
            "of shape (T,) from -1 to 1: one channel."
        )
    if not isinstance(rate, int | np.integer) or rate not in RATES:
        raise InputError(
            f"rate is {rate!r}; expected {RATES[0]} to {RATES[-1]} samples a second, such as "
            f"{RATE}."
        )
    samples = resampled(audio, int(rate))
    if len(samples) < SHORTEST * HOP:
        raise InputError(
            f"The audio has {len(samples) / RATE:.3f} s; expected {SHORTEST * HOP / RATE} s or "
            "more."
        )
    return samples


def _tokenizer(model: Any) -> Any:
    from flaxen.text import tokenizer

    if model.origin.folder is None:
        raise InputError("This model has no folder to find a tokenizer in; pass tokenizer=.")
    return tokenizer(model.origin.folder)


def _spectrogram(samples: np.ndarray, window: int, mels: int) -> np.ndarray:
    """(mels, frames), with a window of zeros after it. Audio shorter than a window is filled up
    with silence first, as in training.
    """
    short = max(0, window * HOP - len(samples))
    return np.pad(log_mel(np.pad(samples, (0, short)), mels), [(0, 0), (0, window)])


def _segments(
    found: list[Piece], heard: Heard, offset: float, words: Words, tok: Any
) -> Iterator[Segment]:
    """Those pieces that hold words, at their place in the audio."""
    for piece in found:
        spoken = [token for token in piece.tokens if token < words.end]
        text = decode(tok, spoken)
        if text.strip():
            yield Segment(
                start=round(offset + piece.start, 2),
                end=round(offset + piece.end, 2),
                text=text,
                tokens=piece.tokens,
                avg_logprob=heard.avg_logprob,
                no_speech_prob=heard.no_speech_prob,
                temperature=heard.temperature,
            )


class Ear:
    """Listens to single windows."""

    def __init__(
        self,
        model: Any,
        tok: Any,
        words: Words,
        temperatures: tuple[float, ...],
        trust: Trust,
        most: int | None,
    ):
        vocab, placement = model.module.embed_tokens.weight.shape[0], model.runtime.placement
        if not temperatures:
            raise InputError("temperatures is empty; expected one or more, such as (0.0,).")
        self.model, self.tok, self.words = model, tok, words
        self.temperatures, self.trust = temperatures, trust
        self.most = most or model.module.longest() // 2
        self.rules: Rules = rules(vocab, {}, stored(model), placement)
        self.timed: TimestampRule = rule(words.times, words.end, words.latest)

    def language(self, frames: np.ndarray) -> str:
        """The code of the language that is likeliest spoken."""
        begun = self._begun(frames, [self.words.start])
        scores = np.asarray(on_host(begun.logits))[0, -1]
        return max(self.words.languages, key=lambda code: scores[self.words.languages[code]])

    def hear(self, frames: np.ndarray, prompt: list[int], timed: bool) -> Heard:
        """What is said in a window of frames (mels, window), as far as it is to be trusted."""
        begun = self._begun(frames, prompt)
        # Whether anybody speaks shows where the text begins.
        silence = jax.nn.softmax(begun.logits[0, 0].astype(jnp.float32))[self.words.nothing]
        heard = None
        for number, temperature in enumerate(self.temperatures):
            tokens, sure = self._said(begun, temperature, number, timed)
            heard = Heard(tokens, sure, float(silence), temperature)
            if self._silent(heard) or self._trusted(heard):
                break
        assert heard is not None
        return heard

    def pieces(self, heard: Heard, seconds: float, timed: bool) -> tuple[list[Piece], float]:
        """What of a window is kept, and after how many seconds the next begins."""
        if self._silent(heard):
            return [], seconds
        if timed:
            return pieces(heard.tokens, self.words.times, seconds)
        return [Piece(0.0, seconds, heard.tokens)], seconds

    def _silent(self, heard: Heard) -> bool:
        unsure = heard.avg_logprob < self.trust.logprob
        return unsure and heard.no_speech_prob > self.trust.no_speech

    def _trusted(self, heard: Heard) -> bool:
        text = decode(self.tok, [t for t in heard.tokens if t < self.words.end]).encode()
        shrinks = len(text) / len(zlib.compress(text))
        return shrinks <= self.trust.compression and heard.avg_logprob >= self.trust.logprob

    def _begun(self, frames: np.ndarray, prompt: list[int]) -> Begun:
        module, runtime = self.model.module, self.model.runtime
        states = encode(module, frames[None], None, runtime=runtime)
        start = np.asarray([prompt], np.int32)
        return begin(module, states, None, start, room=bucket(self.most), runtime=runtime)

    def _said(
        self, begun: Begun, temperature: float, seed: int, timed: bool
    ) -> tuple[list[int], float]:
        """Tokens without the end, and their mean log-probability, the end's too."""
        model = self.model
        given = {"temperature": temperature, "seed": seed, "max_new_tokens": self.most}
        given |= {"eos_token_id": self.words.end, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = resolve(model, begun.cache.capacity, given)
        tokens, logprobs, count = on_host(
            say(
                model.module,
                begun,
                asked.traced(model.runtime, logprobs=True),
                self.rules,
                self.timed if timed else None,
                keys=model.module.encoder.length,
                room=asked.room,
                runtime=model.runtime,
            )
        )
        tokens, logprobs = tokens[0, : int(count)], logprobs[0, : int(count)]
        said = [int(token) for token in tokens if token != self.words.end]
        return said, float(logprobs.mean())
