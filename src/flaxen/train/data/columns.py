"""Fields under other names, and conversations in another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Fields = dict[str, Any]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""What speakers are called where messages have `from` and `value`."""


def under_our_names(fields: Fields, columns: Sequence[tuple[str, str]]) -> Fields | str:
    """A record's fields as `kinds` knows them, or what is wrong. columns: (our name, theirs); if
    there are any, other fields are left out.
    """
    lacking = [theirs for _, theirs in columns if theirs not in fields]
    if lacking:
        found = ", ".join(map(repr, fields)) or "nothing"
        return f"lacks the columns {', '.join(map(repr, lacking))}; found {found}"
    if columns:
        fields = {ours: fields[theirs] for ours, theirs in columns}
    if "conversations" not in fields or "messages" in fields:
        return fields
    messages = _messages(fields["conversations"])
    if isinstance(messages, str):
        return messages
    return {k: v for k, v in fields.items() if k != "conversations"} | {"messages": messages}


def _messages(conversation: Any) -> list[Any] | str:
    """Turns with `from` and `value`, as messages; others stay as they are."""
    if not isinstance(conversation, list):
        return f"'conversations' is {str(conversation)[:40]!r}, not a list"
    messages = []
    for i, turn in enumerate(conversation):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        if turn["from"] not in ROLES:
            return f"turn {i} is from {turn['from']!r}; known are {', '.join(ROLES)}"
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        messages.append({"role": ROLES[turn["from"]], "content": turn.get("value")} | rest)
    return messages
