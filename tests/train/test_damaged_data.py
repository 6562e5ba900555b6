"""Files as other programs leave them: cut off, marked, with halves of characters, or changed."""

from __future__ import annotations

import codecs
import datetime
import gzip
import json

import pytest
from objective_runs import model, records, tok
from words import TEMPLATE, word_tokenizer

from flaxen.core.errors import InputError
from flaxen.train import TrainConfig
from flaxen.train.data.encoding import encoded
from flaxen.train.data.parts import parts_of
from flaxen.train.data.prompts import Prompts, asked
from flaxen.train.data.records import Records, found_in, read_records
from flaxen.train.run.log import Log
from flaxen.train.run.samples import sample_prompts

LINES = "".join(json.dumps({"text": f"a w{i}"}) + "\n" for i in range(2000)).encode()


def texts(path):
    return [record.fields["text"] for record in read_records(path)]


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n'),
        ("a.json", b'[{"text": "a"}, {"text": "b"}]'),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n'),
        ("a.jsonl.gz", b'{"text": "a"}\r\n{"text": "b"}\r\n'),
    ],
)
def test_a_mark_before_utf_8_is_no_part_of_a_document(tmp_path, name, inside):
    inside = codecs.BOM_UTF8 + inside
    path = tmp_path / name
    path.write_bytes(gzip.compress(inside) if name.endswith("gz") else inside)
    assert texts(path) == ["a", "b"]


def test_a_text_begins_behind_its_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a b")
    (tmp_path / "empty.txt").write_bytes(codecs.BOM_UTF8)
    assert texts(tmp_path) == ["a b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_of_a_character_is_told_by_its_line(tmp_path, name):
    whole, half = json.dumps({"text": "a 😀"}), '{"text": "a \\ud83d b"}'
    text = f"{whole}\n{half}\n" if name == "a.jsonl" else f"[{whole}, {half}]"
    (tmp_path / name).write_text(text)
    where = r"a\.jsonl:2" if name == "a.jsonl" else r"a\.json\[1\]"
    with pytest.raises(InputError, match=where + r": has '\\ud83d', which is half of a character"):
        texts(tmp_path / name)


def test_data_that_changes_while_it_is_read_is_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    records = Records(parts_of(path))
    assert len(records) == 2000
    path.write_bytes(b"nonsense\n")
    with pytest.raises(InputError, match=r"has changed\. .*a\.jsonl:1: not JSON"):
        list(records)
    path.unlink()
    for look in (lambda: list(records), records.size, records.digest):
        with pytest.raises(InputError, match=r"a\.jsonl cannot be read: No such file"):
            look()


def test_parquet_text_that_is_not_utf_8_is_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ends, letters = b"\0\0\0\0\3\0\0\0", b"a\xff "
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(letters)]
    column = pyarrow.Array.from_buffers(pyarrow.utf8(), 1, buffers)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: not parquet \(.*can't decode byte 0xff"):
        texts(tmp_path)


def test_a_dataset_that_fails_on_the_way_is_told_by_its_row(monkeypatch):
    def rows(*_):
        yield {"text": "a"}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr("flaxen.train.data.hub.opened", rows)
    found = found_in(parts_of("hf:owner/name"), ("text",), streaming=True)
    assert next(found)[1] == {"text": "a"}
    with pytest.raises(InputError, match=r"owner/name:train\[1\] cannot be read: ConnectionError"):
        next(found)


def test_whatever_a_template_makes_of_a_record_names_its_line():
    chat = word_tokenizer()
    chat.chat_template = TEMPLATE
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InputError, match=r"a\.jsonl:1: The chat template refuses"):
        list(encoded(chat, records({"messages": turns, "tools": "search"})))
    chat.chat_template = "{{ 1 // (messages | length - 2) }}"
    with pytest.raises(InputError, match=r"a\.jsonl:1: The chat template refuses .*by zero"):
        list(encoded(chat, records({"messages": turns})))


def test_columns_of_tables_need_not_be_of_json(tmp_path):
    """As dates of parquet, which reward functions are given as they are."""
    of = lambda day: asked(tok(), records({"prompt": "a", "when": datetime.date(2026, 1, day)}), 8)
    hashes = [Prompts(of(day), 0, 1, 0).fingerprint() for day in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]
    log = Log(tmp_path / "log.jsonl", 0)
    log.write({"step": 1, "prompt": [{"role": "user", "when": datetime.date(2026, 1, 1)}]})
    assert log.rows()[0]["prompt"][0]["when"] == "2026-01-01"


def test_prompts_to_sample_end_with_line_feeds_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        codecs.BOM_UTF8 + '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode()
    )
    config = TrainConfig(output="unused", sample_prompts=str(tmp_path / "a.jsonl"))
    assert [one.text for one in sample_prompts(config, model(), tok())] == ["a\u2028b", "c"]
