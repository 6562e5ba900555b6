"""The kinds of records: by which key each is told, what else it has, and what is wrong with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """key: the one by which it is told; about: how errors describe it; problem: what is wrong with
    the fields of a record of this kind, or None.
    """

    key: str
    about: str
    problem: Callable[[Fields], str | None]


CAUSAL = ("text", "messages", "completion")
"""The kinds that every token's prediction is learned from."""


def expected(kinds: Sequence[str]) -> str:
    """What a line may be, for errors."""
    return "a JSON object with " + ", or with ".join(KINDS[kind].about for kind in kinds)


def kind_of(fields: Fields, kinds: Sequence[str]) -> str | None:
    """Which one of these kinds it is; None if it is none, or several."""
    found = [kind for kind in kinds if KINDS[kind].key in fields]
    return found[0] if len(found) == 1 else None


def problem_of(fields: Fields, kinds: Sequence[str]) -> str | None:
    """What keeps fields from being a record of one of these kinds, or None."""
    kind = kind_of(fields, kinds)
    if kind is None:
        return f"found the keys {', '.join(map(repr, fields)) or 'nothing'}"
    return KINDS[kind].problem(fields)


def _strings(*keys: str) -> Callable[[Fields], str | None]:
    def problem(fields: Fields) -> str | None:
        for key in keys:
            if key not in fields:
                return f"found the keys {', '.join(map(repr, fields))}, and no {key!r}"
            if not isinstance(fields[key], str):
                return f"{key!r} is {str(fields[key])[:40]!r}, not a string"
        return None

    return problem


def _text(fields: Fields) -> str | None:
    wrong, spans = _strings("text")(fields), fields.get("spans")
    if wrong is not None or "spans" not in fields:
        return wrong
    length = len(fields["text"])
    if not isinstance(spans, list) or not spans or not all(_span(x, length) for x in spans):
        return (
            f"'spans' is {str(spans)[:40]!r}, not a list of [start, stop], characters "
            f"of the text: 0 <= start < stop <= {length}"
        )
    return None


def _span(span: Any, length: int) -> bool:
    whole = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    return whole and 0 <= span[0] < span[1] <= length


def _messages(messages: Any, key: str = "messages") -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"{key!r} is not a list with at least one message"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {i} is {str(message)[:40]!r}, not an object with a role"
        if not isinstance(message.get("content"), str | list | None):
            return f"the content of message {i} is {str(message['content'])[:40]!r}, not text"
    return None


def _asking(messages: Any, key: str) -> str | None:
    wrong = _messages(messages, key)
    if wrong is None and messages[-1]["role"] == "assistant":
        return "the last message is the assistant's, so there is nothing to answer"
    return wrong


def _prompt(fields: Fields) -> str | None:
    if isinstance(fields["prompt"], list):
        return _asking(fields["prompt"], "prompt")
    return _strings("prompt")(fields)


def _answered(messages: Any, key: str = "messages") -> str | None:
    wrong = _messages(messages, key)
    if wrong is None and not any(message["role"] == "assistant" for message in messages):
        return "no message has the role 'assistant', so there is nothing to learn"
    return wrong


def _alike(fields: Fields, answers: Sequence[str]) -> str | None:
    """Prompt and answers are all strings, or all lists of messages."""
    keys = [*(["prompt"] if "prompt" in fields else []), *answers]
    if any(isinstance(fields.get(key), list) for key in keys):
        check = lambda key: (_answered if key in answers else _messages)(fields.get(key), key)
        return next(filter(None, map(check, keys)), None)
    return _strings(*keys)(fields)


def _preference(fields: Fields) -> str | None:
    return _alike(fields, ("chosen", "rejected"))


def _judged(fields: Fields) -> str | None:
    if not isinstance(fields.get("label"), bool):
        return f"'label' is {str(fields.get('label'))[:40]!r}, not true or false"
    return _strings("prompt")(fields) if "prompt" not in fields else _alike(fields, ("completion",))


def _labelled(fields: Fields) -> str | None:
    label = fields.get("label")
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        return f"'label' is {str(label)[:40]!r}, not a whole number from 0 on"
    return _strings("text")(fields)


def _pair(fields: Fields) -> str | None:
    if ("query" in fields) == ("anchor" in fields):
        return "expected one of 'query' and 'anchor'"
    if "negative" in fields and "negatives" in fields:
        return "expected one of 'negative' and 'negatives'"
    found = negatives(fields)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        return f"the negatives are {str(found)[:40]!r}, not strings"
    return _strings("query" if "query" in fields else "anchor", "positive")(fields)


def negatives(fields: Fields) -> Any:
    """Those of a pair: one, a list, or none."""
    return [fields["negative"]] if "negative" in fields else fields.get("negatives", [])


KINDS: dict[str, Kind] = {
    "text": Kind("text", '"text" (perhaps with "spans")', _text),
    "messages": Kind(
        "messages",
        '"messages" (a list of {"role": ..., "content": ...})',
        lambda fields: _answered(fields["messages"]),
    ),
    "completion": Kind("prompt", '"prompt" and "completion"', _strings("prompt", "completion")),
    "preference": Kind(
        "chosen", '"prompt", "chosen" and "rejected" (strings, or lists of messages)', _preference
    ),
    "judged": Kind(
        "completion",
        '"prompt", "completion" (strings, or lists of messages) and "label" (true or false)',
        _judged,
    ),
    "prompt": Kind("prompt", '"prompt" (a string, or a list of messages)', _prompt),
    "conversation": Kind(
        "messages",
        '"messages" that the assistant is to answer',
        lambda fields: _asking(fields["messages"], "messages"),
    ),
    "labelled": Kind("label", '"text" and "label" (a whole number)', _labelled),
    "pair": Kind(
        "positive", '"query" or "anchor", "positive", and maybe "negative" or "negatives"', _pair
    ),
}
