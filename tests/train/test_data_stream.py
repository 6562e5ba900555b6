"""A stream gives the same batches whenever it is entered, and says where it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.core.errors import ConfigError, InputError
from flaxen.train import TrainConfig, train
from flaxen.train.data.encoding import encoded
from flaxen.train.data.parts import parts_of
from flaxen.train.data.records import Record
from flaxen.train.data.stream import Stream, shuffled
from flaxen.train.settings import as_yaml, read_yaml, run_config


@pytest.fixture(scope="module")
def tok():
    return word_tokenizer(90)


def write(path, first, count):
    draw = np.random.default_rng(first)
    lines = [{"text": " ".join([f"w{first + i}"] * int(draw.integers(1, 6)))} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def stream(tok, *data, **settings):
    settings = {"steps": 50, "batch_size": 2, "seq_len": 8, "shuffle_buffer": 7} | settings
    config = TrainConfig(output="x", streaming=True, **settings)
    return Stream(tok, parts_of(list(data)), config, 1, ("text",))


def test_a_step_is_the_same_whenever_it_is_entered(tok, tmp_path):
    data = write(tmp_path / "a.jsonl", 10, 30)
    one, other = stream(tok, data), stream(tok, data)
    inorder = [one.batch_at(step) for step in range(20)]
    for step in (13, 14, 2, 19, 0):
        for key, array in other.batch_at(step).items():
            np.testing.assert_array_equal(array, inorder[step][key])
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("packing", [True, False])
def test_a_pass_has_every_document_once_and_the_next_another_order(tok, tmp_path, packing):
    data = write(tmp_path / "a.jsonl", 10, 30)
    batches = stream(tok, data, packing=packing, batch_size=1)
    seen: list[int] = []
    step = 0
    while len(seen) < 60:
        batch = batches.batch_at(step)
        row, targets = batch["ids"][0, 0], batch["targets"][0, 0]
        starts = batch["positions"][0, 0] == 0 if packing else np.arange(8) == 0
        seen += [int(t) for t, s, y in zip(row, starts, targets, strict=True) if s and y != -100]
        step += 1
    first, second = seen[:30], seen[30:60]
    assert sorted(first) == sorted(second) == list(range(10, 40))
    assert first != second and first != sorted(first)


def test_a_shuffle_mixes_far_and_keeps_all():
    records = [Record(str(i), {}) for i in range(1000)]
    found = [int(r.where) for r in shuffled(records, 100, (0, 0))]
    assert sorted(found) == list(range(1000))
    assert found == [int(r.where) for r in shuffled(records, 100, (0, 0))]
    assert found != [int(r.where) for r in shuffled(records, 100, (0, 1))]
    assert np.abs(np.subtract(found, range(1000))).mean() > 50


def test_parts_of_a_stream_take_turns_by_weight(tok, tmp_path):
    a, b = write(tmp_path / "a.jsonl", 10, 4), write(tmp_path / "b.jsonl", 50, 30)
    entries = [{"path": a, "weight": 3}, {"path": b, "weight": 1}]
    batches = stream(tok, *entries, packing=False, batch_size=4)
    for step in range(20):
        firsts = batches.batch_at(step)["ids"][0, :, 0]
        assert (firsts < 50).sum() == 3


def test_a_bad_line_is_told_when_it_comes(tok, tmp_path):
    path = write(tmp_path / "a.jsonl", 10, 700)
    with path.open("a") as file:
        file.write("{nonsense\n")
    batches = stream(tok, path, packing=False)
    batches.batch_at(0)
    for _ in range(2):
        with pytest.raises(InputError, match=r"a\.jsonl:701: not JSON"):
            for step in range(1, 400):
                batches.batch_at(step)


def test_what_is_too_long_is_told_once(tok, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    line = {"prompt": "w10 " * 5, "completion": "w11 " * 5}
    path.write_text((json.dumps(line) + "\n") * 4)
    config = TrainConfig(output="x", streaming=True, steps=9, seq_len=8, batch_size=2)
    batches = Stream(tok, parts_of(path), config, 1, ("completion",))
    for step in range(9):
        batches.batch_at(step)
    assert caplog.text.count("4 of 4 chats and completions are longer than seq_len=8") == 1


def test_a_stream_of_nothing_ends(tok, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(InputError, match="has a target"):
        stream(tok, path).batch_at(0)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"streaming": True}, "say steps"),
        ({"streaming": True, "steps": 3, "group_by_length": True}, "has no group_by_length"),
        ({"group_by_length": True}, "say packing: false"),
        ({"group_by_length": True, "packing": False, "objective": "dpo"}, "not dpo"),
    ],
)
def test_settings_that_do_not_go_together_are_told(settings, found):
    with pytest.raises(ConfigError, match=found):
        TrainConfig(output="x", **settings)


def test_an_objective_that_needs_all_data_refuses_a_stream(tok, tmp_path):
    data = write(tmp_path / "a.jsonl", 10, 3)
    settings = {"output": tmp_path / "run", "steps": 1, "streaming": True, "progress": False}
    with pytest.raises(InputError, match="'dpo' reads its data whole"):
        train(tiny(), tok, data, objective="dpo", **settings)


def test_a_run_learns_from_a_mixture_that_is_read_as_it_goes(tok, tmp_path):
    a, b = write(tmp_path / "a.jsonl", 10, 4), write(tmp_path / "b.jsonl", 50, 30)
    data = [{"path": a, "weight": 2}, {"path": b, "weight": 1}]
    settings = {"steps": 2, "batch_size": 2, "seq_len": 8, "streaming": True, "progress": False}
    run = train(tiny(), tok, data, output=tmp_path / "run", eval_data=[a, b], **settings)
    batches = stream(tok, *data, steps=2, shuffle_buffer=10_000)
    targets = [int((batches.batch_at(step)["targets"] != -100).sum()) for step in (0, 1)]
    assert [row["tokens"] for row in run.rows if "tokens" in row] == targets
    assert [row["epoch"] for row in run.rows if "epoch" in row] == [0.5, 1.0]
    assert sorted(run.perplexities) == [0, 2]


def test_a_file_says_mixtures_and_columns(tmp_path):
    values = {
        "model": "m",
        "data": [{"path": "a.jsonl", "weight": 3}, {"path": "b", "weight": 1}],
        "columns": {"prompt": "instruction"},
    }
    run = run_config(values)
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(run))
    assert run_config(read_yaml(path)) == run
    assert run.data == values["data"]


def test_documents_of_a_stream_are_those_of_a_file(tok, tmp_path):
    """Nothing but their order differs."""
    data = write(tmp_path / "a.jsonl", 10, 5)
    batches = stream(tok, data, packing=False, batch_size=5)
    batch = batches.batch_at(0)
    rows = sorted(
        tuple(row[: (t != -100).sum() + 1].tolist())
        for row, t in zip(batch["ids"][0], batch["targets"][0], strict=True)
    )
    lines = [Record("", json.loads(line)) for line in data.read_text().splitlines()]
    assert rows == sorted(tuple(d.ids) for d in encoded(tok, lines))
