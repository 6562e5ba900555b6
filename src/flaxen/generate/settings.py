"""What was asked for: arguments over the model's generation config over defaults."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flaxen.core.errors import InputError, did_you_mean
from flaxen.generate.buckets import bucket
from flaxen.generate.sampling import Sampling
from flaxen.layers.runtime import Runtime
from flaxen.shard import everywhere

EOS_SLOTS = 8

Rule = tuple[type, Callable[[Any], bool], str]

RULES: dict[str, Rule] = {
    "max_new_tokens": (int, lambda x: 1 <= x < 2**31, "a whole number from 1 to 2147483647"),
    "max_length": (
        int,
        lambda x: 1 <= x < 2**31,
        "a whole number from 1 to 2147483647 (prompt and new tokens together)",
    ),
    "min_new_tokens": (int, lambda x: x >= 0, "a whole number from 0"),
    "temperature": (float, lambda x: x >= 0, "a number from 0 (0 is greedy)"),
    "top_k": (int, lambda x: x >= 0, "a whole number from 0 (0 is off)"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0 and up to 1 (1 is off)"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (float, lambda x: x > 0, "a number above 0 (1 is off)"),
    "seed": (int, lambda x: 0 <= x < 2**63, "a whole number from 0"),
}
NAMES = (*RULES, "do_sample", "eos_token_id", "pad_token_id")
ASKS_FOR_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one generation, under Hugging Face's names.

    `max_new_tokens` is settled; an empty `eos_token_id` means that nothing ends a row.
    """

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    seed: int

    def traced(self, runtime: Runtime, *, logprobs: bool = False) -> Sampling:
        """The same as arrays, on every device of the runtime's mesh."""
        eos = np.full(-(-max(len(self.eos_token_id), 1) // EOS_SLOTS) * EOS_SLOTS, -1, np.int32)
        eos[: len(self.eos_token_id)] = self.eos_token_id
        values: dict[str, Any] = {
            "sample": np.bool_(self.do_sample),
            "temperature": np.float32(self.temperature if self.do_sample else 1),
            "top_k": np.int32(min(self.top_k, 2**31 - 1)),
            "top_p": np.float32(self.top_p),
            "min_p": np.float32(self.min_p),
            "repetition_penalty": np.float32(self.repetition_penalty),
            "min_new_tokens": np.int32(min(self.min_new_tokens, 2**31 - 1)),
            "limit": np.int32(self.max_new_tokens),
            "logprobs": np.bool_(logprobs),
            "eos": eos,
            "pad": np.int32(self.pad_token_id),
            "key": jax.random.key(self.seed),
        }
        return everywhere(Sampling(**values), runtime.placement)

    @property
    def room(self) -> int:
        """Slots for the new tokens, rounded up."""
        return bucket(self.max_new_tokens)


def resolve(model: Any, columns: int, arguments: Mapping[str, Any]) -> Settings:
    """Settings for a prompt of `columns` slots. An argument that is None counts as not given.

    Greedy unless sampling is asked for by do_sample=True, or by a temperature above 0, a top_k, a
    top_p or a min_p; then what is not given comes from the model's generation config.
    `max_new_tokens` wins over `max_length`, arguments win over the model's, and without any there
    are 20 new tokens. top_k is off unless somebody says otherwise.

    Raises:
        InputError: naming the argument, its value and what is expected.
    """
    asked = {name: value for name, value in arguments.items() if value is not None}
    for name in asked.keys() - set(NAMES):
        raise InputError(f"Unknown generation argument {name!r}.{did_you_mean(name, NAMES)}")
    vocab = model.module.embed_tokens.vocab_size
    asked = {name: _checked(name, value, vocab) for name, value in asked.items()}
    stored = _stored(model)
    sample = _samples(asked)
    value = lambda name, default: asked.get(name, stored.get(name, default))
    drawn = lambda name, default: value(name, default) if sample else default
    eos = value("eos_token_id", ())
    return Settings(
        max_new_tokens=_limit(asked, stored, columns),
        min_new_tokens=value("min_new_tokens", 0),
        do_sample=sample and drawn("temperature", 1.0) > 0,
        temperature=drawn("temperature", 1.0),
        top_k=drawn("top_k", 0),
        top_p=drawn("top_p", 1.0),
        min_p=drawn("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        eos_token_id=eos,
        pad_token_id=value("pad_token_id", next(iter(eos), 0)),
        seed=asked.get("seed", 0),
    )


def _samples(asked: Mapping[str, Any]) -> bool:
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if asked.get("temperature") == 0:
        return False
    wanted = any(asked.get(name, off[name]) != off[name] for name in ASKS_FOR_SAMPLING)
    return asked.get("do_sample", wanted)


def _limit(asked: Mapping[str, Any], stored: Mapping[str, Any], columns: int) -> int:
    for source in (asked, stored):
        if "max_new_tokens" in source:
            return source["max_new_tokens"]
        if "max_length" in source:
            most = source["max_length"]
            if most <= columns:
                raise InputError(
                    f"max_length is {most} and the prompt has {columns} tokens, so there is "
                    "no room for a new one. Pass max_new_tokens, or a larger max_length."
                )
            return most - columns
    return 20


def _stored(model: Any) -> dict[str, Any]:
    """What the checkpoint says, as far as it makes sense; ids may stand in the model's config."""
    config, ours = model.config, {**(model.generation_config or {})}
    if hasattr(config, "text_config"):
        config = config.get_text_config()  # of a model that sees
    for name in ("eos_token_id", "pad_token_id", "max_length"):
        if ours.get(name) is None:
            ours[name] = getattr(config, name, None)
    vocab, found = model.module.embed_tokens.vocab_size, {}
    for name in (n for n in NAMES if ours.get(n) is not None):
        try:
            found[name] = _checked(name, ours[name], vocab)
        except InputError:
            # A strange value in a file must not keep the model from running.
            continue
    if found.get("max_length") == 20:
        del found["max_length"]  # Transformers' old default, written into many files: nobody's wish
    return found


def _checked(name: str, value: Any, vocab: int) -> Any:
    if name == "do_sample":
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"do_sample is {value!r}; expected True or False.")
        return bool(value)
    if name in ("eos_token_id", "pad_token_id"):
        return _token_ids(name, value, vocab)
    kind, fits, words = RULES[name]
    number = _number(value, kind)
    if number is None or not fits(number):
        raise InputError(f"{name} is {value!r}; expected {words}.")
    return number


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool | str):
        return None
    try:
        number = operator.index(value) if kind is int else float(value)
        return number if math.isfinite(number) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _token_ids(name: str, value: Any, vocab: int) -> Any:
    several = name == "eos_token_id" and isinstance(value, list | tuple | np.ndarray | jax.Array)
    ids = [_number(x, int) for x in (value if several else [value])]
    if any(x is None or not 0 <= x < vocab for x in ids):
        words = "a token id, or a list of them," if name == "eos_token_id" else "a token id"
        raise InputError(f"{name} is {value!r}; expected {words} from 0 to {vocab - 1}.")
    return tuple(ids) if name == "eos_token_id" else ids[0]


__all__ = ["NAMES", "Settings", "resolve"]
