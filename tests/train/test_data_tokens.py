"""What is learned of a record, and tokens that stay on disk."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from words import TEMPLATE, word_tokenizer

from flaxen.core.errors import InputError
from flaxen.text import encode, render_with_mask
from flaxen.train.data import tokens as tokens_file
from flaxen.train.data.encoding import encoded
from flaxen.train.data.examples import cut, tokenise
from flaxen.train.data.parts import parts_of
from flaxen.train.data.records import Record, Records
from flaxen.train.data.tokens import in_memory, tokens_of

BOS, EOS, A, B, C, D = 1, 2, 4, 5, 6, 7
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.fixture
def tok():
    found = word_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def bos_tok(tok):
    """One that begins every text with a BOS."""
    tok.add_special_tokens({"bos_token": "<s>"})
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tok


def records(*fields):
    return [Record(f"here:{i}", each) for i, each in enumerate(fields, 1)]


def labels(tok, fields, seq_len=32, **settings):
    (one,) = tokenise(tok, records(fields), seq_len, **settings)
    return one.labels.tolist()


def learned(tok, fields, **settings):
    return [label for label in labels(tok, fields, **settings) if label != -100]


def test_a_chat_has_one_bos_whoever_writes_it(bos_tok):
    for template in (TEMPLATE, "{{ bos_token }} " + TEMPLATE):
        bos_tok.chat_template = template
        (one,) = encoded(bos_tok, records({"messages": TALK}))
        assert list(one.ids) == render_with_mask(bos_tok, TALK)[0]
        assert list(one.ids).count(BOS) == 1 and one.ids[0] == BOS


def test_a_text_keeps_the_bos_that_it_says_itself(bos_tok):
    texts = ["a b", "<s> a b", "<s> <s> a"]
    found = [list(d.ids) for d in encoded(bos_tok, records(*({"text": t} for t in texts)))]
    assert found == [[BOS, A, B, EOS], [BOS, A, B, EOS], [BOS, BOS, A, EOS]]
    assert found == [[*encode(bos_tok, text), EOS] for text in texts]


def test_what_is_encoded_together_is_what_is_encoded_alone(bos_tok):
    every = records(
        {"text": "a b"},
        {"messages": TALK},
        {"prompt": "a", "completion": "b c"},
        {"text": "<s> d"},
        {"text": "a b c", "spans": [[2, 3]]},
        {"messages": TALK[:2]},
    )
    for together, record in zip(encoded(bos_tok, every), every, strict=True):
        (alone,) = encoded(bos_tok, [record])
        assert list(together.ids) == list(alone.ids)
        np.testing.assert_array_equal(together.learned, alone.learned)


def test_padding_that_is_eos_leaves_the_real_one():
    tok = word_tokenizer()
    assert tok.pad_token_id == tok.eos_token_id == EOS
    assert labels(tok, {"text": "a b"}) == [A, B, EOS]


def test_an_end_that_is_there_already_is_not_written_twice(tok):
    assert labels(tok, {"text": "a </s>"}) == [A, EOS]
    assert labels(tok, {"prompt": "a", "completion": "b </s>"}) == [-100, B, EOS]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", [B, EOS, D, EOS]),
        ("last", [D, EOS]),
        ("all", [3, A, EOS, 8, B, EOS, 3, C, EOS, 8, D, EOS]),
    ],
)
def test_what_is_learned_of_a_chat(tok, train_on, expected):
    assert learned(tok, {"messages": TALK}, train_on=train_on) == expected


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("marks", [False, True])
def test_a_message_may_be_left_out(tok, flag, marks):
    if marks:
        tok.chat_template = (
            "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }} {{ eos_token }}{% endgeneration %}{% else %}{{ m.content }} "
            "{{ eos_token }}{% endif %} {% endfor %}"
        )
    talk = [*TALK[:3], TALK[3] | flag]
    assert learned(tok, {"messages": talk}) == [B, EOS]
    if not marks:
        everything_else = learned(tok, {"messages": talk}, train_on="all")
        assert everything_else == [3, A, EOS, 8, B, EOS, 3, C, EOS]
    with pytest.raises(InputError, match="here:1: Every message says"):
        learned(tok, {"messages": [TALK[0], TALK[1] | flag]})


def test_parts_of_answers_cannot_be_left_out(tok):
    tok.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    )
    with pytest.raises(InputError, match="marks 4 parts of 2 answers"):
        learned(tok, {"messages": TALK}, train_on="last")


def test_spans_are_what_is_learned_of_a_text(tok):
    assert labels(tok, {"text": "a b c", "spans": [[0, 1], [2, 3]]}) == [A, B, -100, -100]
    assert labels(tok, {"text": "a b c", "spans": [[4, 5]]}) == [-100, -100, C, EOS]
    with pytest.raises(InputError, match="here:1: no token lies in 'spans'"):
        labels(tok, {"text": "a b c", "spans": [[1, 2]]})


def test_an_answer_that_is_cut_off_is_learned_so_far(tok):
    long = [TALK[0], {"role": "assistant", "content": "b c d"}]
    assert labels(tok, {"messages": long}, seq_len=6) == [-100, -100, -100, -100, B, C]


def test_chats_longer_than_a_row_are_cut_or_left_out_and_counted(tok, caplog):
    every = records({"messages": TALK}, {"messages": TALK[:2]}, {"text": "a b c d a b c d"})
    with caplog.at_level(logging.WARNING):
        kept = tokenise(tok, every, 7)
        dropped = tokenise(tok, every, 7, overlong="drop")
    assert (len(kept), len(dropped)) == (4, 3)
    assert "1 of 3 chats and completions are longer than seq_len=7 and were cut" in caplog.text
    assert "and were left out" in caplog.text


def pieces_in_words(lengths, splits, seq_len, overlong):
    """(start, stop) of each example, document by document."""
    at, found = 0, []
    for length, split in zip(lengths, splits, strict=True):
        if split:
            start = 0
            while True:
                found.append((at + start, at + min(start + seq_len, length)))
                start += seq_len - 1
                if start >= length - 1:
                    break
        elif overlong == "cut" or length <= seq_len:
            found.append((at, at + min(length, seq_len)))
        at += length
    return found


@pytest.mark.parametrize("overlong", ["cut", "drop"])
def test_cutting_is_that_of_a_loop(overlong):
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(0, 30, 12)
        documents = [
            (draw.integers(0, 9, n).tolist(), draw.random(n) < 0.3, bool(draw.random() < 0.5))
            for n in lengths
        ]
        tokens = in_memory(tokens_file.Document(*d) for d in documents)
        found = cut(tokens, 7, overlong)
        expected = [
            (start, stop)
            for start, stop in pieces_in_words(lengths, tokens.splits, 7, overlong)
            if tokens.learned[start + 1 : stop].any()
        ]
        assert list(zip(found.starts.tolist(), found.stops.tolist(), strict=True)) == expected


def source(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Records(parts_of(path))


def test_tokens_on_disk_are_those_in_memory(tok, tmp_path):
    found = source(tmp_path / "a.jsonl", "a b", "c d a")
    here = tokenise(tok, found, 4)
    there = tokenise(tok, found, 4, cache=str(tmp_path / "kept"))
    assert isinstance(there.tokens.ids, np.memmap)
    assert here.fingerprint() == there.fingerprint()
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.labels, other.labels)
    assert [p.name for p in (tmp_path / "kept").iterdir() if "." in p.name] == []


def test_the_next_run_encodes_nothing(tok, tmp_path, monkeypatch):
    tokens_of(tok, source(tmp_path / "a.jsonl", "a b"), cache=str(tmp_path / "kept"))
    monkeypatch.setattr(tokens_file, "encoded", lambda *_: pytest.fail("encoded again"))
    again = tokens_of(tok, source(tmp_path / "b.jsonl", "a b"), cache=str(tmp_path / "kept"))
    assert again.ids.tolist() == [A, B, EOS]


@pytest.mark.parametrize("what", ["bytes", "tokenizer", "template", "train_on"])
def test_whatever_tokens_depend_on_makes_others(tok, tmp_path, what):
    kept, settings = tmp_path / "kept", {}
    tokens_of(tok, source(tmp_path / "a.jsonl", "a b"), cache=str(kept))
    found = source(tmp_path / "a.jsonl", "a c" if what == "bytes" else "a b")
    if what == "tokenizer":
        tok.add_special_tokens({"bos_token": "<s>"})
    elif what == "template":
        tok.chat_template += " "
    elif what == "train_on":
        settings = {"train_on": "all"}
    tokens_of(tok, found, cache=str(kept), **settings)
    assert len(list(kept.iterdir())) == 2


def test_tokens_that_are_not_all_there_are_made_anew(tok, tmp_path):
    kept = tmp_path / "kept"
    tokens_of(tok, source(tmp_path / "a.jsonl", "a b"), cache=str(kept))
    (folder,) = kept.iterdir()
    (folder / "ids.bin").write_bytes(b"\0" * 8)
    assert tokens_of(tok, source(tmp_path / "a.jsonl", "a b"), cache=str(kept)).ids[0] == A


def test_nothing_stays_of_tokens_that_could_not_be_made(tok, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": ""}]}) + "\n")
    tok.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(InputError, match=r"a\.jsonl:1: "):
        tokens_of(tok, Records(parts_of(path)), cache=str(tmp_path / "kept"))
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tok, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be kept .* token_cache=none"):
        tokens_of(tok, source(tmp_path / "a.jsonl", "a b"), cache=str(tmp_path / "file"))


def test_only_large_sources_are_kept_unasked(tok, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = source(tmp_path / "a.jsonl", "a b")
    tokens_of(tok, found, cache="auto")
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(tokens_file, "LARGE", 4)
    tokens_of(tok, found, cache="auto")
    assert len(list((tmp_path / "home" / "flaxen" / "tokens").iterdir())) == 1
