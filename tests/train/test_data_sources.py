"""Every kind of data is read the same way, in an order of its own, or refused by name."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from flaxen.core.errors import InputError
from flaxen.train.data.files import documents
from flaxen.train.data.hub import HubData, hub_data
from flaxen.train.data.kinds import KINDS
from flaxen.train.data.parts import parts_of, weights_of
from flaxen.train.data.records import Records, read_records


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def texts(data, columns=None):
    return [record.fields["text"] for record in Records(parts_of(data, columns))]


def write(path, *names):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(*({"text": name} for name in names)))
    return path


def test_globs_and_folders_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "c", "a"):
        write(tmp_path / "in" / f"{name}.jsonl", name)
    write(tmp_path / "in" / "deep" / "d.json", "d")
    write(tmp_path / "in" / ".hidden" / "e.jsonl", "e")
    (tmp_path / "in" / "picture.png").write_bytes(b"")
    assert texts(tmp_path / "in" / "*.jsonl") == ["a", "b", "c"]
    assert texts(str(tmp_path / "in" / "**" / "*.json*")) == ["a", "b", "c", "d"]
    assert texts(tmp_path / "in") == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("none.jsonl", "There is no file"),
        ("*.jsonl", "No file is called like"),
        ("owner/name.jsonl", "There is no file"),
        ("empty", "has no file of"),
        ("picture.png", "is none of .jsonl"),
        ("data.parquet.gz", "is none of .jsonl"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, path, found):
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "data.parquet.gz").write_bytes(b"")
    with pytest.raises(InputError, match=found):
        parts_of(str(tmp_path / path))


def test_an_array_and_its_lines_are_the_same_documents(tmp_path):
    array, plain = tmp_path / "a.json", tmp_path / "b.json"
    array.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    plain.write_text(lines({"text": "a"}, {"text": "b"}))
    assert texts(array) == texts(plain) == ["a", "b"]
    assert [where for where, _ in documents(array)] == [f"{array}[0]", f"{array}[1]"]


def test_a_bad_place_in_an_array_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, 3]')
    with pytest.raises(InputError, match=r"a\.json\[1\]: found a int"):
        texts(path)


def test_compressed_files_are_those_inside(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines({"text": "a"}, {"text": "b"}))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("c\nd")
    assert texts(tmp_path) == ["a", "b", "c\nd"]


def test_zstandard_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines({"text": "a"}, {"text": "b"}).encode())
    assert texts(tmp_path / "a.jsonl.zst") == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_damaged_file_is_named(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(InputError, match=name):
        texts(tmp_path / name)


def test_parquet_rows_lack_what_their_table_fills_up(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"text": "a"}, {"messages": [m | {"name": None} for m in chat]}]
    parquet.write_table(
        pyarrow.Table.from_pylist(
            [{"text": None, "messages": None} | row for row in rows],
            schema=pyarrow.schema(
                [
                    ("text", pyarrow.string()),
                    (
                        "messages",
                        pyarrow.list_(
                            pyarrow.struct(
                                [(key, pyarrow.string()) for key in ("role", "content", "name")]
                            )
                        ),
                    ),
                ]
            ),
        ),
        tmp_path / "a.parquet",
    )
    first, second = read_records(tmp_path / "a.parquet")
    assert (first.fields, second.fields) == ({"text": "a"}, {"messages": chat})
    assert second.where.endswith("a.parquet:2")


def test_foreign_columns_are_renamed_and_others_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"instruction": "a", "output": "b", "text": "both"}))
    entry = {"path": path, "columns": {"prompt": "instruction", "completion": "output"}}
    (record,) = read_records([entry])
    assert record.fields == {"prompt": "a", "completion": "b"}
    with pytest.raises(InputError, match=r"a\.jsonl:1: lacks the columns 'question'; found"):
        read_records({"path": path, "columns": {"prompt": "question", "completion": "output"}})


def test_turns_with_from_and_value_are_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]
    path.write_text(lines({"conversations": [*turns, {"from": "gpt", "value": "b", "weight": 0}]}))
    (record,) = read_records(path)
    assert record.fields["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
    ]
    path.write_text(lines({"conversations": [{"from": "bing", "value": "b"}]}))
    with pytest.raises(InputError, match="turn 0 is from 'bing'; known are human"):
        read_records(path)


@pytest.mark.parametrize("spans", [[], [[1, 1]], [[0, 4]], [[-1, 2]], [[0, True]], "all", [[0]]])
def test_spans_outside_of_the_text_are_refused(tmp_path, spans):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"text": "abc", "spans": spans}))
    with pytest.raises(InputError, match=r"a\.jsonl:1: 'spans' is .* 0 <= start < stop <= 3"):
        read_records(path)


def test_weights_are_said_in_an_entry_or_behind_a_path(tmp_path):
    a, b = write(tmp_path / "a.jsonl", "a"), write(tmp_path / "b.jsonl", "b")
    assert weights_of(parts_of([{"path": a, "weight": 3}, f"{b}=0.5"])) == (3.0, 0.5)
    assert weights_of(parts_of([a, b])) is None
    odd = write(tmp_path / "c=2", "c").rename(tmp_path / "c.jsonl=2")
    with pytest.raises(InputError, match="is none of"):
        parts_of(str(odd))  # a file of that name comes first


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ([], "the list is empty"),
        ([{"path": "{a}", "wieght": 3}], "unknown key 'wieght'. Did you mean 'weight'"),
        ([{"weight": 3}], "has no path"),
        ([{"path": "{a}", "weight": 0}], "expected a number above 0"),
        ([{"path": "{a}", "weight": True}], "expected a number above 0"),
        ([{"path": "{a}", "weight": 1}, "{a}"], "has no weight, but other data has"),
        ([{"path": "{a}", "split": "test"}], "is a file, which has no split"),
        ([{"path": "{a}", "columns": ["x"]}], "expected a name for each field"),
    ],
)
def test_what_is_wrong_with_an_entry_is_told(tmp_path, data, found):
    a = str(write(tmp_path / "a.jsonl", "a"))
    said = json.loads(json.dumps(data).replace("{a}", a))
    with pytest.raises(InputError, match=found):
        parts_of(said)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("o/n", HubData("o/n")),
        ("o/n:test", HubData("o/n", split="test")),
        ("o/n:main:test", HubData("o/n", "main", "test")),
        ("o/n@abc:train[:10]", None),
        ("o/n@abc", HubData("o/n", revision="abc")),
    ],
)
def test_names_of_datasets_say_config_split_and_revision(name, data):
    if data is not None:
        assert hub_data(name) == data
        assert parts_of(f"hf:{name}")[0].hub == data
    else:
        with pytest.raises(InputError, match="expected hf:owner/name"):
            hub_data(name + ":a:b")


def test_a_name_without_a_file_is_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parts_of("owner/name")[0].hub == HubData("owner/name")
    write(tmp_path / "owner" / "name" / "a.jsonl", "a")
    assert parts_of("owner/name")[0].hub is None


@pytest.mark.filterwarnings("default")  # those of the library are its own
def test_a_dataset_is_read_whole_or_as_a_stream(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from flaxen.train.data.records import found_in

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "set" / "train.jsonl", "a", "b")
    write(tmp_path / "set" / "test.jsonl", "c")
    here = f"hf:{tmp_path / 'set'}"
    assert texts(here) == ["a", "b"]
    assert texts(f"{here}:test") == ["c"]
    streamed = found_in(parts_of(here), tuple(KINDS), streaming=True)
    assert [fields["text"] for _, fields in streamed] == ["a", "b"]
    assert Records(parts_of(here)).digest() == Records(parts_of(here)).digest()
    with pytest.raises(InputError, match="cannot be read"):
        texts(f"{here}:nonsense")


def test_a_hash_of_the_data_changes_with_its_bytes_alone(tmp_path):
    a, b = write(tmp_path / "a.jsonl", "a", "b"), write(tmp_path / "b.jsonl", "a", "b")
    digest = lambda *paths, **more: Records(parts_of(list(paths), **more)).digest()
    assert digest(a) == digest(b)
    assert digest(a) != digest(a, b)
    assert digest(a) != digest(a, columns={"text": "text"})
    write(b, "a", "c")
    assert digest(a) != digest(b)


def test_documents_need_not_fit_into_memory(tmp_path):
    """They are read anew each time, one after another."""
    path = write(tmp_path / "a.jsonl", "a", "b", "c")
    records = Records(parts_of(path))
    assert len(records) == 3
    assert next(iter(records)).fields == {"text": "a"}
    assert [r.fields["text"] for r in records] == ["a", "b", "c"]
    assert np.size(records.size()) == 1
