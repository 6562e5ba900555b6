"""Files are checked whole before anything is used, and the loss is on the right tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from words import TEMPLATE, word_tokenizer

from flaxen.core.errors import InputError
from flaxen.train.data.batches import make_batches
from flaxen.train.data.examples import Example, tokenise
from flaxen.train.data.packing import blank, fill, pack
from flaxen.train.data.records import read_records

EOS, A, B, C, D = 2, 4, 5, 6, 7


@pytest.fixture(scope="module")
def tok():
    return word_tokenizer()


def write(path, *lines):
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


def example(ids, labels=None):
    ids = np.asarray(ids, np.int32)
    return Example(ids, ids if labels is None else np.asarray(labels, np.int32))


def test_all_kinds_of_documents_are_read(tmp_path):
    lines = write(
        tmp_path / "a.jsonl",
        {"text": "a b"},
        "\n",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
    )
    book = write(tmp_path / "b.txt", "a b\n\nc d\n")
    records = read_records([lines, book])
    assert [r.where.rpartition("/")[2] for r in records] == [
        "a.jsonl:1",
        "a.jsonl:3",
        "a.jsonl:4",
        "b.txt",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{nonsense\n", "not JSON"),
        ("[1, 2]\n", "found a list"),
        ('{"body": "a"}\n', "found the keys 'body'"),
        ('{"text": 3}\n', "'text' is '3', not a string"),
        ('{"prompt": "a"}\n', "found the keys 'prompt', and no 'completion'"),
        ('{"messages": []}\n', "at least one message"),
        ('{"messages": [{"content": "a"}]}\n', "not an object with a role"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "nothing to learn"),
    ],
)
def test_a_bad_line_is_one_error_with_its_place(tmp_path, line, found):
    path = write(tmp_path / "a.jsonl", {"text": "a"}, line)
    with pytest.raises(InputError) as error:
        read_records(path)
    assert f"{path}:2: " in str(error.value)
    assert found in str(error.value)
    assert 'expected on each: a JSON object with "text"' in str(error.value)


def test_all_bad_lines_are_told_at_once(tmp_path):
    path = write(tmp_path / "a.jsonl", *["{\n"] * 8)
    with pytest.raises(InputError, match=r"(?s):1: .*:5: .*and 3 more"):
        read_records(path)


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="byte 3 is not UTF-8"):
        read_records(path)


def test_a_text_ends_with_eos_and_predicts_it(tmp_path, tok):
    """Padding is EOS too; the label of the real one stays, those of the padding are ignored."""
    assert tok.pad_token_id == tok.eos_token_id == EOS
    (one,) = tokenise(tok, read_records(write(tmp_path / "a.jsonl", {"text": "a b"})), 5)
    np.testing.assert_array_equal(one.labels, [A, B, EOS])
    row = {key: array[0] for key, array in blank(1, 5, packed=False).items()}
    fill(row, [one])
    np.testing.assert_array_equal(row["ids"][:3], [A, B, EOS])
    np.testing.assert_array_equal(row["targets"], [B, EOS, -100, -100, -100])


def test_a_long_text_predicts_every_token_once(tmp_path, tok):
    records = read_records(write(tmp_path / "a.jsonl", {"text": "a b c d a b c"}))
    pieces = tokenise(tok, records, 4)
    assert [list(p.ids) for p in pieces] == [[A, B, C, D], [D, A, B, C], [C, EOS]]
    targets = [t for piece in pieces for t in piece.labels[1:]]
    assert targets == [B, C, D, A, B, C, EOS]


def test_a_completion_counts_without_its_prompt(tmp_path, tok):
    line = {"prompt": "a b", "completion": "c d"}
    (one,) = tokenise(tok, read_records(write(tmp_path / "a.jsonl", line)), 8)
    np.testing.assert_array_equal(one.ids, [A, B, C, D, EOS])
    np.testing.assert_array_equal(one.labels, [-100, -100, C, D, EOS])


def test_a_chat_counts_only_the_assistant(tmp_path, tok):
    tok.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (one,) = tokenise(tok, read_records(write(tmp_path / "a.jsonl", {"messages": messages})), 32)
    kept = one.labels[one.labels != -100]
    np.testing.assert_array_equal(kept, [B, EOS, D, EOS])


def test_a_chat_that_the_template_refuses_is_named(tmp_path, tok):
    tok.chat_template = "{{ raise_exception('no') }}"
    messages = [{"role": "assistant", "content": "a"}]
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    with pytest.raises(InputError, match=r"a\.jsonl:1: "):
        tokenise(tok, read_records(path), 8)


def test_nothing_left_to_predict_is_an_error(tmp_path, tok):
    path = write(tmp_path / "a.jsonl", {"prompt": "a b c d", "completion": "a"})
    with pytest.raises(InputError, match="seq_len=3"):
        tokenise(tok, read_records(path), 3)


def test_packed_documents_do_not_predict_each_other():
    row = {key: array[0] for key, array in blank(1, 6, packed=True).items()}
    fill(row, [example([1, 2, 3]), example([4, 5])])
    np.testing.assert_array_equal(row["targets"], [2, 3, -100, 5, -100, -100])
    np.testing.assert_array_equal(row["segments"], [1, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(row["positions"], [0, 1, 2, 0, 1, 0])


def test_packing_keeps_every_example_whole_and_once():
    lengths = np.random.default_rng(0).integers(2, 33, 200).tolist()
    rows = pack(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 32 for row in rows)
    assert len(rows) <= 1.1 * -(-sum(lengths) // 32)


def test_an_epoch_has_every_row_once_and_its_own_order():
    examples = [example([i, i]) for i in range(10)]
    batches = make_batches(examples, seq_len=2, batch_size=2, accumulation=2, packing=False)
    assert batches.per_epoch == 3

    def epoch(number):
        steps = range(3 * number, 3 * number + 3)
        taken = [batches.batch_at(step) for step in steps]
        return [int(t) for b in taken for t in b["targets"][..., 0].ravel() if t != -100]

    assert sorted(epoch(0)) == sorted(epoch(1)) == list(range(10))
    assert epoch(0) != epoch(1)
    assert batches.batch_at(2)["ids"].shape == (2, 2, 2)


def test_any_step_can_be_entered_again():
    examples = [example(np.arange(2 + i % 5)) for i in range(30)]
    one, other = (make_batches(examples, seq_len=8, batch_size=2, seed=3) for _ in range(2))
    for step in range(9):
        other.batch_at(step)
    for key, array in one.batch_at(7).items():
        np.testing.assert_array_equal(array, other.batch_at(7)[key])
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != make_batches(examples[1:], seq_len=8, batch_size=2).fingerprint()
