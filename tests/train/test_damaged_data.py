"""Files as other programs leave them: cut off, marked, with halves of characters, or changed."""

from __future__ import annotations

import codecs
import gzip
import json

import pytest

from flaxen.core.errors import InputError
from flaxen.train.data.parts import parts_of
from flaxen.train.data.records import Records, read_records

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
