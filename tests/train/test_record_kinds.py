"""Kinds of records: what each is, what is wrong with one, and the rows made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from words import TEMPLATE, word_tokenizer

from flaxen.core.errors import InputError
from flaxen.train.data.answers import answered, both_answers
from flaxen.train.data.kinds import CAUSAL, problem_of
from flaxen.train.data.records import Record, read_records
from flaxen.train.data.rows import RowBatches, filled, number

SAYS = lambda text, role="assistant": {"role": role, "content": text}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("preference", {"chosen": [SAYS("b")], "rejected": [SAYS("c")]}),
        ("judged", {"prompt": "a", "completion": "b", "label": False}),
        ("labelled", {"text": "a", "label": 0}),
        ("pair", {"anchor": "a", "positive": "b", "negatives": ["c", "d"]}),
        ("pair", {"query": "a", "positive": "b", "negative": "c"}),
        ("text", {"text": "a", "label": 1, "source": "here"}),
    ],
)
def test_records_of_a_kind_are_read(kind, fields):
    assert problem_of(fields, (kind,)) is None


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("preference", {"text": "a"}, "found the keys 'text'"),
        ("preference", {"prompt": "a", "chosen": "b"}, "and no 'rejected'"),
        ("preference", {"chosen": [SAYS("b")], "rejected": "c"}, "'rejected' is not a list"),
        ("preference", {"chosen": [SAYS("b", "user")], "rejected": []}, "role 'assistant'"),
        ("judged", {"prompt": "a", "completion": "b", "label": 1}, "not true or false"),
        ("judged", {"completion": "b", "label": True}, "and no 'prompt'"),
        ("labelled", {"text": "a", "label": True}, "not a whole number"),
        ("labelled", {"text": "a", "label": -1}, "not a whole number"),
        ("pair", {"query": "a", "anchor": "a", "positive": "b"}, "one of 'query' and 'anchor'"),
        ("pair", {"query": "a", "positive": "b", "negatives": "c"}, "not strings"),
        ("pair", {"query": "a", "positive": "b", "negatives": [1]}, "not strings"),
    ],
)
def test_what_is_wrong_is_said(kind, fields, why):
    assert why in problem_of(fields, (kind,))


def test_lines_of_another_kind_are_one_error_with_their_places(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"chosen": "a", "rejected": "b", "prompt": "c"}, {"text": "a"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        InputError, match=r'"chosen" and "rejected"[\s\S]*a\.jsonl:2: found the key'
    ):
        read_records(path, ("preference",))
    with pytest.raises(InputError, match=r"a\.jsonl:1: "):
        read_records(path, CAUSAL)


@pytest.fixture(scope="module")
def tok():
    found = word_tokenizer(24)
    found.chat_template = TEMPLATE
    return found


def test_an_answer_is_learned_and_its_prompt_is_not(tok):
    """a b -> c, and the EOS."""
    ids, targets = answered(tok, "a b", "c").row(8)
    assert ids.tolist() == [4, 5, 6, 2]
    assert targets.tolist() == [-100, 6, 2, -100]


def test_of_a_conversation_the_last_answer_is_learned(tok):
    """The assistant's turn in the prompt is not."""
    prompt = [SAYS("a", "user"), SAYS("b"), SAYS("c", "user")]
    ids, targets = answered(tok, prompt, [SAYS("d")]).row(32)
    assert ids.tolist() == [3, 4, 2, 8, 5, 2, 3, 6, 2, 8, 7, 2]
    assert targets[targets != -100].tolist() == [7, 2]
    assert targets[9:11].tolist() == [7, 2]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("a b c d", "a b user"),
        ([SAYS("a b", "user"), SAYS("c d")], [SAYS("a b", "user"), SAYS("user")]),
    ],
)
def test_a_prompt_may_be_implied(tok, chosen, rejected):
    """It is what both begin with."""
    first, second = both_answers(tok, Record("a:1", {"chosen": chosen, "rejected": rejected}))
    assert first.prompt == second.prompt
    learned = lambda side: [x for x, yes in zip(side.answer, side.learned, strict=True) if yes]
    assert (learned(first), learned(second)) == ([6, 7, 2], [3, 2])


def test_answers_that_do_not_differ_are_refused(tok):
    with pytest.raises(InputError, match="a:1: .*do not differ"):
        both_answers(tok, Record("a:1", {"chosen": "a b", "rejected": "a b"}))


def batches(rows: int = 5, **more) -> RowBatches:
    made = [{"ids": np.full(i + 1, i, np.int32), "label": number(i)} for i in range(rows)]
    blank = {"ids": filled(8, -1), "label": number(-100)}
    about = {"batch_size": 2, "accumulation": 2, "seed": 3} | more
    return RowBatches(made, blank, **about)


def test_every_row_is_there_once_an_epoch_in_an_order_of_its_own():
    of = batches()
    assert of.per_epoch == 2
    orders = []
    for epoch in (0, 1):
        steps = [of.batch_at(2 * epoch + i) for i in (0, 1)]
        labels = np.concatenate([batch["label"].ravel() for batch in steps])
        assert sorted(labels[labels != -100]) == [0, 1, 2, 3, 4]
        orders.append(labels.tolist())
    assert orders[0] != orders[1]


def test_rows_are_padded_and_the_last_batch_is_filled_with_blank_ones():
    batch = batches().batch_at(1)
    assert batch["ids"].shape == (2, 2, 8)
    assert batch["label"].shape == (2, 2)
    for ids, label in zip(batch["ids"].reshape(4, 8), batch["label"].ravel(), strict=True):
        length = max(int(label) + 1, 0)
        assert (ids[:length] == label).all()
        assert (ids[length:] == -1).all()
    assert (batch["label"] == -100).sum() == 3


def test_the_hash_is_of_every_row():
    assert batches().fingerprint() == batches().fingerprint() != batches(rows=4).fingerprint()
