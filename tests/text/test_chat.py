"""Conversations become token ids, and the assistant's tokens are told apart."""

from __future__ import annotations

import pytest
from conftest import CHATML

from flaxen.core.errors import InputError
from flaxen.text import decode, encode, encode_chat, render_chat, render_with_mask

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
    talk = [HELLO[0], {"role": "assistant", "content": "a \t\n b"}]
    ids, mask = render_with_mask(tok, talk)
    assert marked(tok, ids, mask) == "a \t\n b<|im_end|>"


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
