"""A model that says what it is told to, one character a token."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import numpy as np
import pytest

import flaxen
from flaxen.core.tree import module, static
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


@dataclasses.dataclass
class Cache:
    lengths: list[int]


@dataclasses.dataclass(frozen=True)
class Loaded:
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@module
class Model:
    layers: Any
    loading: static[Loaded] = Loaded()


def tiny(**report: Any) -> Model:
    """An abstract model with two layers of attention."""
    sizes = {"embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Model(layers=[attention(**sizes) for _ in range(2)], loading=Loaded(**report))


@dataclasses.dataclass
class Stage:
    """What the commands asked for, and what the model will say."""

    says: str = "Paris."
    loads: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompts: list[str] = dataclasses.field(default_factory=list)
    options: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    model: Any = dataclasses.field(default_factory=tiny)
    tokenizer: Tokenizer = dataclasses.field(default_factory=Tokenizer)

    def load(self, source: str, **options: Any) -> Any:
        options.pop("progress", None)
        self.loads.append({"source": source, **options})
        return self.model

    def stream(self, model: Any, ids: np.ndarray, *, cache: Cache | None, **options: Any):
        self.prompts.append("".join(map(chr, ids[0])))
        self.options.append({**options, "cached": cache is not None})
        held = (cache.lengths[0] if cache else 0) + ids.shape[1]
        return Steps(self.says, Cache([held]))


class Steps:
    """Like the decode loop: a token is run only when the next one is wanted."""

    def __init__(self, text: str, cache: Cache):
        self.text, self.cache = text, cache

    def __iter__(self):
        for i, character in enumerate(self.text):
            if i:
                self.cache.lengths[0] += 1
            yield np.array([ord(character)])


def set_stage(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Stage:
    """Put the stubs where the commands look for the rooms they use."""
    stage = Stage(**given)
    text = types.SimpleNamespace(encode=encode, encode_chat=encode_chat, TextStream=TextStream)
    monkeypatch.setitem(sys.modules, "flaxen.text", text)
    monkeypatch.setitem(sys.modules, "flaxen.generate", types.SimpleNamespace(stream=stage.stream))
    monkeypatch.setitem(vars(flaxen), "load", stage.load)
    monkeypatch.setitem(vars(flaxen), "tokenizer", lambda source: stage.tokenizer)
    return stage
