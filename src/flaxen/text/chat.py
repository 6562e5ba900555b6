"""Messages to token ids, through the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.text.tokenizer import Span, decode, encode_all_with_offsets, encode_with_offsets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

TAIL = 64
"""Characters in which the last token of a text surely lies."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    system: str | None = None,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    Messages are `{"role": ..., "content": ...}`; content may be a list of text parts (joined in
    order) or null. The ids are those that `encode` makes of `render_chat`.
    Raises InputError if the tokenizer has no chat template or the template refuses the messages.
    """
    text, _ = _render(tok, _plain(messages, system), tools, add_generation_prompt)
    return encode_rendered(tok, text)


def encode_rendered(tok: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of what `render_chat` gave."""
    return _encode(tok, text)[0]


def render_chat(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    system: str | None = None,
    pictures: bool = False,
) -> str:
    """The text that the chat template makes of a conversation. With `pictures` there may be
    `{"type": "image"}` among the parts of a content, and the template says what stands for them.
    """
    return _render(tok, _plain(messages, system, pictures), tools, add_generation_prompt)[0]


def render_with_mask(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    max_length: int | None = None,
    train_on: str = "assistant",
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and 1 for each token that is learned: `render_with_spans` says
    which. `max_length` cuts ids and mask alike.
    Raises InputError if nothing is learned, or its place cannot be told.
    """
    text, spans = render_with_spans(tok, messages, tools=tools, train_on=train_on)
    ids, offsets = _encode(tok, text)
    mask = learned_tokens(offsets, spans).astype(int).tolist()
    return ids[:max_length], mask[:max_length]


def render_with_spans(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    train_on: str = "assistant",
) -> tuple[str, list[Span]]:
    """The text of a conversation, and its (start, stop) characters that are learned.

    train_on: `assistant`, all that the assistant wrote, its ends of turns too; `last`, its last
    turn; `all`, everything. A message with `"train": false` or `"weight": 0` is never learned. The
    assistant's parts are those the template marks with `{% generation %}`; without marks they are
    found by rendering the conversation up to each turn.
    Raises InputError if no message is learned, or its place cannot be told.
    """
    plain = _plain(messages, None)
    answers = [i for i, message in enumerate(plain) if message["role"] == "assistant"]
    if not answers and train_on != "all":
        raise InputError("No message has the role 'assistant', so there is nothing to train on.")
    wanted = {"assistant": answers, "last": answers[-1:], "all": range(len(plain))}[train_on]
    turns = [i for i in wanted if plain[i].get("train", True) and plain[i].get("weight", 1)]
    if not turns:
        raise InputError('Every message says "train": false or "weight": 0: nothing to train on.')
    plain = [{k: v for k, v in m.items() if k not in ("train", "weight")} for m in plain]
    text, marked = _render(tok, plain, tools, False)
    if train_on == "all" and len(turns) == len(plain):
        return text, [(0, len(text))]
    if train_on == "all" or not _MARKER.search(_template(tok, tools)):
        return text, list(_spans(tok, plain, tools, text, turns, headers=train_on == "all"))
    if turns == answers:
        return text, marked
    if len(marked) != len(answers):
        raise InputError(
            f"The chat template marks {len(marked)} parts of {len(answers)} answers with "
            "{% generation %}, so that those of some answers cannot be told; train on all."
        )
    return text, [span for i, span in zip(answers, marked, strict=True) if i in turns]


def learned_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """`tokens_in` of a rendered conversation.
    Raises InputError if none is.
    """
    mask = tokens_in(offsets, spans)
    if not mask.any():
        raise InputError(
            "The chat template leaves no token to the assistant: its turns are empty, or its "
            "{% generation %} marks enclose nothing."
        )
    return mask


def tokens_in(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Which tokens, by their characters, lie in one of the spans: bool (n,). A token does if it
    shares a character with one or, trimmed down to nothing, ends in it.
    """
    starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
    lows, highs = np.asarray(_merged(spans), np.int64).reshape(-1, 2).T
    # The first span that ends behind a token's start, or not before an empty token.
    first = np.searchsorted(highs, starts, "right")
    first = np.where(starts == stops, np.searchsorted(highs, stops, "left"), first)
    return np.append(lows, np.iinfo(np.int64).max)[first] < stops


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, apart from each other."""
    merged: list[Span] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        elif low < high:
            merged.append((low, high))
    return merged


def encode_all_rendered(
    tok: PreTrainedTokenizerFast, texts: Sequence[str]
) -> list[tuple[list[int], list[Span]]]:
    """Token ids of what `render_with_spans` gave, and the characters of each; on all cores."""
    return [_open(tok, *found) for found in encode_all_with_offsets(tok, texts)]


def _encode(tok: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[Span]]:
    return _open(tok, *encode_with_offsets(tok, text))


def _open(
    tok: PreTrainedTokenizerFast, ids: list[int], offsets: list[Span]
) -> tuple[list[int], list[Span]]:
    """Without the EOS that some tokenizers add: a template writes its own."""
    if ids[-1:] == [tok.eos_token_id] and offsets[-1] == (0, 0):
        return ids[:-1], offsets[:-1]
    return ids, offsets


def _spans(
    tok: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: Any,
    text: str,
    turns: Sequence[int],
    headers: bool,
) -> Iterator[Span]:
    """The characters of each of these turns: from the end of its prompt to its own end or, with
    headers, from the end of the turn before to all that the template writes of it.
    """
    for i in turns:
        prompt = _render(tok, messages[:i], tools, not headers)[0] if i or not headers else ""
        through = _render(tok, messages[: i + 1], tools, False)[0]
        if not (text.startswith(through) and through.startswith(prompt)):
            raise InputError(
                f"The chat template renders message {i} differently once more messages follow, so "
                "the assistant's tokens cannot be told. Mark them in the template with "
                "{% generation %} ... {% endgeneration %}, or train on one answer at a time."
            )
        yield len(prompt), len(through) if headers else _end_of_turn(tok, through)


def _end_of_turn(tok: PreTrainedTokenizerFast, text: str) -> int:
    """Where the assistant stops: white space after the token that ends its turn is not its own."""
    bare = text.rstrip()
    last = tok(bare[-TAIL:], add_special_tokens=False)["input_ids"][-1:]
    # Decoding leaves out special tokens, and them alone.
    return len(bare) if last and not decode(tok, last) else len(text)


def _template(tok: PreTrainedTokenizerFast, tools: Any) -> str:
    try:
        return tok.get_chat_template(tools=tools)
    except ValueError as error:
        raise InputError(
            "This tokenizer has no chat template (a base model's has none). Pass plain text, or "
            "set tok.chat_template to the template the model was trained with."
        ) from error


def _render(
    tok: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
) -> tuple[str, list[Span]]:
    """The rendered text, and the characters between the template's own generation marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = _template(tok, tools)
    marked = bool(_MARKER.search(template))
    named: dict[str, Any] = dict(tok.special_tokens_map)
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools=None if tools is None else list(tools),
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
            **named,
        )
    except Exception as error:  # a template is a program, and may fail in any way
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(f"The chat template refuses these messages ({roles}): {error}") from error
    return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if marked else []


def _plain(
    messages: Sequence[Message], system: str | None, pictures: bool = False
) -> list[Message]:
    """Checked copies of the messages, each with a string as its content, or with `pictures` the
    parts of one that has some.
    """
    if not messages:
        raise InputError("A conversation needs at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(
                f"Message {i} is {message!r}; expected {{'role': ..., 'content': ...}}."
            )
    if system is not None:
        if messages[0]["role"] == "system":
            raise InputError(
                "There is a system message already; leave out `system` or that message."
            )
        messages = [{"role": "system", "content": system}, *messages]
    is_picture = lambda part: isinstance(part, dict) and part.get("type") == "image"
    seen = lambda x: pictures and isinstance(x, list) and any(map(is_picture, x))
    contents = [m.get("content") for m in messages]
    made = [x if seen(x) else _content(i, x) for i, x in enumerate(contents)]
    return [{**m, "content": x} for m, x in zip(messages, made, strict=True)]


def _content(i: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(f"Message {i} has a {type(content).__name__} as content; expected text.")
    return "".join(_part(i, part) for part in content)


def _part(i: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise InputError(f"Message {i} has a part that is no text: {str(part)[:80]}.")
    return text
