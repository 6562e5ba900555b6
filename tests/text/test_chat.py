"""Conversations become token ids, and the assistant's tokens are told apart."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_words import CHATML

from flaxen.core.errors import InputError
from flaxen.text import (
    decode,
    encode,
    encode_chat,
    render_chat,
    render_with_mask,
    token_texts,
    tokens_in,
)

HELLO = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "\n no"},
]
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def marked(tok, ids, mask) -> str:
    return tok.decode([i for i, m in zip(ids, mask, strict=True) if m])


def test_a_rendered_chat_encodes_to_the_same_ids(tok):
    text = render_chat(tok, HELLO)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert encode_chat(tok, HELLO) == encode(tok, text)


def test_one_bos_whether_the_template_writes_it_or_not(piece_tok):
    for template in ("<s>{{ messages[0].content }}", "{{ messages[0].content }}"):
        piece_tok.chat_template = template
        ids = encode_chat(piece_tok, HELLO)
        assert ids == encode(piece_tok, render_chat(piece_tok, HELLO))
        assert ids.count(piece_tok.bos_token_id) == 1


def test_no_eos_follows_the_generation_prompt(piece_tok):
    piece_tok.chat_template = "{{ messages[0].content }}"
    piece_tok.add_eos_token = True
    assert encode(piece_tok, "hello")[-1] == piece_tok.eos_token_id
    assert encode_chat(piece_tok, HELLO)[-1] != piece_tok.eos_token_id


def test_text_parts_are_joined_in_order(tok):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert encode_chat(tok, [{"role": "user", "content": parts}]) == encode_chat(tok, HELLO)


def test_content_may_be_null(tok):
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert "<|im_start|>assistant\n<|im_end|>" in render_chat(tok, [*HELLO, call])


def test_a_system_text_goes_first(tok):
    assert render_chat(tok, HELLO, system="s").startswith("<|im_start|>system\ns<|im_end|>")
    with pytest.raises(InputError, match="system message already"):
        render_chat(tok, [{"role": "system", "content": "t"}], system="s")


def test_tools_reach_the_template(tok):
    tok.chat_template = "{{ tools[0].function.name }}"
    tool = {"type": "function", "function": {"name": "add"}}
    assert render_chat(tok, HELLO, tools=[tool]) == "add"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        (["hello"], "Message 0"),
        ([{"content": "x"}], "Message 0"),
        ([{"role": "user", "content": 3}], "int as content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "no text"),
    ],
)
def test_messages_of_another_form_are_refused(tok, messages, match):
    with pytest.raises(InputError, match=match):
        encode_chat(tok, messages)


def test_the_templates_own_refusal_is_passed_on(tok):
    tok.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        encode_chat(tok, HELLO)


def test_without_a_template_the_error_says_so(tok):
    tok.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        encode_chat(tok, HELLO)


def test_the_assistants_tokens_are_marked_without_marks_in_the_template(tok):
    ids, mask = render_with_mask(tok, TALK)
    assert ids == encode_chat(tok, TALK, add_generation_prompt=False)
    assert marked(tok, ids, mask) == "hello<|im_end|>\n\n no<|im_end|>"


def test_any_special_token_may_end_a_turn(tok):
    tok.eos_token = "<bos>"
    ids, mask = render_with_mask(tok, TALK[:2])
    assert marked(tok, ids, mask) == "hello<|im_end|>"


def test_a_template_without_such_tokens_keeps_the_white_space(tok):
    tok.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    ids, mask = render_with_mask(tok, TALK[:2])
    assert marked(tok, ids, mask) == "assistant: hello\n"


def test_a_token_across_the_border_belongs_to_the_answer(tok):
    """The prompt's line break and the answer's make one token: ids of prefixes do not match."""
    ids, mask = render_with_mask(tok, TALK)
    pair = tok.convert_tokens_to_ids("ĊĊ")
    assert [m for i, m in zip(ids, mask, strict=True) if i == pair] == [1]


def test_the_templates_own_marks_count(tok):
    tok.chat_template = MARKED
    ids, mask = render_with_mask(tok, TALK)
    assert marked(tok, ids, mask) == "hello<|im_end|>\n no<|im_end|>"
    assert sum(mask) < len(ids)


def test_an_answer_may_end_with_the_first_token(tok):
    tok.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    talk = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": " hello!"}]
    assert render_with_mask(tok, talk)[1] == [1, 0, 0]


def test_an_answer_cut_off_is_still_marked(tok):
    ids, mask = render_with_mask(tok, TALK)
    first = mask.index(1)
    assert render_with_mask(tok, TALK, max_length=first + 1) == (
        ids[: first + 1],
        [0] * first + [1],
    )


def test_white_space_tokens_of_an_answer_are_marked_though_offsets_are_trimmed(tok):
    from tokenizers.processors import ByteLevel

    tok.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    tok.chat_template = MARKED.replace("<|im_end|>", "")
    talk = [HELLO[0], {"role": "assistant", "content": "a \t b\n "}]
    ids, mask = render_with_mask(tok, talk)
    assert marked(tok, ids, mask) == "a \t b\n "


def test_the_end_of_a_turn_is_marked_also_where_it_serves_as_padding(tok):
    tok.pad_token = tok.eos_token
    ids, mask = render_with_mask(tok, TALK)
    ends = [m for i, m in zip(ids, mask, strict=True) if i == tok.eos_token_id]
    assert ends == [0, 1, 0, 1]


def test_no_assistant_is_an_error(tok):
    with pytest.raises(InputError, match="nothing to train on"):
        render_with_mask(tok, HELLO)


def test_marks_that_enclose_nothing_are_an_error(tok):
    tok.chat_template = "{% generation %}{% endgeneration %}" + CHATML
    with pytest.raises(InputError, match="no token to the assistant"):
        render_with_mask(tok, TALK)


def test_a_template_that_rewrites_earlier_turns_is_an_error(tok):
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content[:2] }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(InputError, match="renders message 1 differently"):
        render_with_mask(tok, TALK)


def test_decoding_leaves_special_tokens_out(tok):
    assert decode(tok, encode_chat(tok, HELLO)) == "user\nhello\nassistant\n"


def test_tokens_lie_in_spans_as_a_loop_says():
    """A token shares a character with a span or, trimmed down to nothing, ends in it."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        edges = np.sort(draw.integers(0, 12, (9, 2)), axis=1)
        offsets, spans = edges[:6], [(a, b) for a, b in edges[6:].tolist() if a < b]
        expected = [
            any(a < stop <= b if start == stop else start < b and stop > a for a, b in spans)
            for start, stop in offsets.tolist()
        ]
        assert tokens_in(offsets.tolist(), spans).tolist() == expected


def test_the_last_answer_alone_may_be_learned(tok):
    for template in (CHATML, MARKED):
        tok.chat_template = template
        ids, mask = render_with_mask(tok, TALK, train_on="last")
        assert marked(tok, ids, mask).strip() == "no<|im_end|>"


def test_everything_may_be_learned(tok):
    ids, mask = render_with_mask(tok, TALK, train_on="all")
    assert marked(tok, ids, mask) == render_chat(tok, TALK, add_generation_prompt=False)
    one = [HELLO[0] | {"train": False}, *TALK[1:]]
    ids, mask = render_with_mask(tok, one, train_on="all")
    assert marked(tok, ids, mask) == render_chat(tok, TALK[1:], add_generation_prompt=False)


def test_an_answer_that_stands_alone_is_learned_without_its_header(tok):
    talk = [{"role": "assistant", "content": "hello"}]
    tok.chat_template = CHATML
    ids, mask = render_with_mask(tok, talk)
    assert marked(tok, ids, mask) == "hello<|im_end|>"


def test_texts_of_tokens_make_up_the_text(tok):
    for text in ("hello  a\n\n\u00e9\u4e2d\U0001f600!", "<|im_start|>a<|im_end|>\n"):
        ids = encode(tok, text)
        assert "".join(token_texts(tok, ids)) == tok.backend_tokenizer.decode(
            ids, skip_special_tokens=False
        )


def test_texts_of_word_pieces_keep_their_spaces(piece_tok):
    ids = encode(piece_tok, "hello hello")
    whole = piece_tok.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(token_texts(piece_tok, ids)) == whole
