"""A model that says what it is told to, one character a token."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import numpy as np
import pytest

import flaxen
from flaxen.layers.attention import attention


class Tokenizer:
    """Token i is the character i; a chat is its messages, one to a line."""

    chat_template: str | None = "lines"


def encode(tok: Tokenizer, text: str) -> list[int]:
    return [ord(c) for c in text]


def encode_chat(tok: Tokenizer, messages: list[dict[str, str]], system: str | None = None):
    told = [f"system: {system}\n"] if system else []
    said = [f"{m['role']}: {m['content']}\n" for m in messages]
    return encode(tok, "".join([*told, *said, "assistant: "]))


class TextStream:
    def __init__(self, tok: Tokenizer, stop: Any = ()):
        self.stop, self.text, self.stopped = tuple(stop), "", False

    def push(self, token: int) -> str:
        self.stopped = chr(token) in self.stop
        return "" if self.stopped else chr(token)

    def finish(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Loaded:
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    module: list[Any]
    loading: Loaded = Loaded()


def tiny(**report: Any) -> Model:
    """An abstract model with two layers of attention."""
    sizes = {"embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Model([attention(**sizes) for _ in range(2)], loading=Loaded(**report))


@dataclasses.dataclass
class Stage:
    """What the commands asked for, and what the model will say."""

    says: str = "Paris."
    loads: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompts: list[str] = dataclasses.field(default_factory=list)
    options: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    cached: list[Any] = dataclasses.field(default_factory=list)
    model: Any = dataclasses.field(default_factory=tiny)
    tokenizer: Tokenizer = dataclasses.field(default_factory=Tokenizer)

    def load(self, source: str, **options: Any) -> Any:
        options.pop("progress", None)
        self.loads.append({"source": source, **options})
        return self.model

    def stream(self, model: Any, ids: np.ndarray, *, cache: Any, **options: Any):
        self.prompts.append("".join(map(chr, ids[0])))
        self.options.append(options)
        self.cached.append(cache)
        return Steps(self.says, ids.shape[1])


@dataclasses.dataclass
class Stats:
    prompt_tokens: list[int]
    finish_reason: tuple[str] = ("stop",)
    prefill_seconds: float = 0.5
    tokens_per_second: float = 12.0
    compiled: bool = False


class Steps:
    """A stream of characters; its cache is named after them."""

    def __init__(self, text: str, prompt: int):
        self.text, self.cache, self.stats = text, f"cache after {text}", Stats([prompt])

    def __iter__(self):
        return (np.array([ord(character)]) for character in self.text)


def set_stage(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Stage:
    """Put the stubs where the commands look for the rooms they use."""
    stage = Stage(**given)
    text = types.SimpleNamespace(encode=encode, encode_chat=encode_chat, TextStream=TextStream)
    monkeypatch.setitem(sys.modules, "flaxen.text", text)
    monkeypatch.setitem(sys.modules, "flaxen.generate", types.SimpleNamespace(stream=stage.stream))
    monkeypatch.setitem(vars(flaxen), "load", stage.load)
    monkeypatch.setitem(vars(flaxen), "tokenizer", lambda source, **_: stage.tokenizer)
    return stage
