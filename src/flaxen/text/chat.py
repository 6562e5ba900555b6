"""Messages to token ids, through the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flaxen.core.errors import InputError
from flaxen.text.tokenizer import decode, encode_with_offsets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
Span = tuple[int, int]

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
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and 1 for each token the assistant wrote (its end of turn too).

    The assistant's parts are those the template marks with `{% generation %}`; without marks they
    are found by rendering the conversation up to each turn. `max_length` cuts ids and mask alike.
    Raises InputError if no message is the assistant's, or its place cannot be told.
    """
    plain = _plain(messages, None)
    if not any(message["role"] == "assistant" for message in plain):
        raise InputError("No message has the role 'assistant', so there is nothing to train on.")
    text, spans = _render(tok, plain, tools, False)
    if not _MARKER.search(_template(tok, tools)):
        spans = list(_spans(tok, plain, tools, text))
    ids, offsets = _encode(tok, text)
    mask = [int(any(_inside(offset, span) for span in spans)) for offset in offsets]
    if not any(mask):
        raise InputError(
            "The chat template leaves no token to the assistant: its turns are empty, or its "
            "{% generation %} marks enclose nothing."
        )
    return ids[:max_length], mask[:max_length]


def _encode(tok: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[Span]]:
    """As `encode`, without the EOS that some tokenizers add: a template writes its own."""
    ids, offsets = encode_with_offsets(tok, text)
    if ids[-1:] == [tok.eos_token_id] and offsets[-1] == (0, 0):
        return ids[:-1], offsets[:-1]
    return ids, offsets


def _inside(offset: Span, span: Span) -> bool:
    """Whether a token shares a character with a span or, trimmed down to nothing, ends in it."""
    (start, stop), (low, high) = offset, span
    return low < stop <= high if start == stop else start < high and stop > low


def _spans(
    tok: PreTrainedTokenizerFast, messages: list[Message], tools: Any, text: str
) -> Iterator[Span]:
    """The characters of each assistant's turn: from the end of its prompt to its own end."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tok, messages[:i], tools, True)[0]
        through = _render(tok, messages[: i + 1], tools, False)[0]
        if not (text.startswith(through) and through.startswith(prompt)):
            raise InputError(
                f"The chat template renders message {i} differently once more messages follow, so "
                "the assistant's tokens cannot be told. Mark them in the template with "
                "{% generation %} ... {% endgeneration %}, or train on one answer at a time."
            )
        yield len(prompt), _end_of_turn(tok, through)


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
    from jinja2 import TemplateError
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
    except (TemplateError, TypeError) as error:
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
