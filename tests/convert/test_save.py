"""Folders we write, against the format's own library and against interruptions."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.save import write_checkpoint
from flaxen.core.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "odd": rng.normal(size=(3, 5)).astype(np.float32),
        "embed": rng.normal(size=(16, 64)).astype(np.float32),
        "norm": rng.normal(size=(64,)).astype(BF16),
        "ids": np.arange(7, dtype=np.int32),
        "mask": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }


def lazy(tensors):
    return {name: ArrayTensor(array) for name, array in tensors.items()}


def contents(folder):
    return {name: (t.dtype, t.shape, t.read().tobytes()) for name, t in load(folder).items()}


def load(folder):
    return open_checkpoint(folder)


def raw(tensors):
    return {n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()}


def test_the_reference_library_reads_the_same_bytes(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    assert raw(load_file(tmp_path / "out" / "model.safetensors")) == raw(arrays())
    assert contents(tmp_path / "out") == raw(arrays())
    assert load(tmp_path / "out").metadata == {"format": "pt"}


def test_own_files_load_as_views(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    checkpoint = load(tmp_path / "out")
    views = {name for name, tensor in checkpoint.items() if tensor.view() is not None}
    assert views >= {"embed", "norm"}


def test_one_tensor_above_the_limit_leaves_no_shard_empty(tmp_path):
    names = {"embed": (16, 64), "a": (8, 8), "b": (8, 8), "c": (16, 8)}
    tensors = {n: np.ones(s, np.float32) for n, s in names.items()}
    write_checkpoint(lazy(tensors), tmp_path, max_shard_size="1KB")
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {name: f for f in files for name in load_file(tmp_path / f)}
    assert all(load_file(tmp_path / f) for f in files)
    assert index["weight_map"] == held and set(held) == set(tensors)
    assert list(index["weight_map"]) == sorted(held)
    assert index["metadata"] == {
        "total_parameters": sum(a.size for a in tensors.values()),
        "total_size": sum(a.nbytes for a in tensors.values()),
    }
    assert contents(tmp_path) == raw(tensors)


@pytest.mark.parametrize("size", [2000, "2000", "2KB", "0.002MB", "1.96KiB"])
def test_a_size_is_a_number_or_has_a_unit(tmp_path, size):
    tensors = {n: np.zeros((250,), np.float32) for n in "abc"}
    write_checkpoint(lazy(tensors), tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("size", ["5 parsecs", 0, -1, None])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(CheckpointError, match=f"{size}'? is no size"):
        write_checkpoint(lazy(arrays()), tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/out cannot be written"):
        write_checkpoint(lazy(arrays()), tmp_path / "file" / "out")


def test_a_disk_that_is_full_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flaxen.convert.formats.writing._write", full)
    with pytest.raises(CheckpointError, match="out cannot be written.*No space left.*unchanged"):
        write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("before", "after"), [(np.float32, BF16), (BF16, np.float32)])
def test_floats_are_converted_and_the_config_says_so(tmp_path, before, after):
    values = np.random.default_rng(0).normal(size=(9, 7)).astype(before)
    live = {"w": values.copy(), "i": np.arange(5, dtype=np.int32), "b": np.array([True])}
    config = {"torch_dtype": np.dtype(before).name, "text_config": {"dtype": "float16"}}
    write_checkpoint(lazy(live), tmp_path, config=config, dtype=after)
    saved = load(tmp_path)
    assert saved["w"].read().tobytes() == values.astype(after).tobytes()
    assert (saved["i"].dtype, saved["b"].dtype) == (np.int32, np.bool_)
    name = np.dtype(after).name
    assert saved.config == {"torch_dtype": name, "text_config": {"dtype": name}}
    assert live["w"].dtype == before and live["w"].tobytes() == values.tobytes()
    assert config["torch_dtype"] == np.dtype(before).name


def test_without_a_request_the_config_follows_the_weights(tmp_path):
    tensors = lazy({"w": np.ones((4, 4), BF16), "norm": np.ones(4, np.float32)})
    write_checkpoint(tensors, tmp_path / "a", config={"dtype": "float16"})
    assert load(tmp_path / "a").config == {"dtype": "bfloat16"}
    write_checkpoint(tensors, tmp_path / "b", config={"dtype": "float32"})
    assert load(tmp_path / "b").config == {"dtype": "float32"}


def test_a_contradictory_generation_config_is_saved_as_it_is(tmp_path):
    wanted = {"do_sample": False, "temperature": 1e-6, "top_p": None}
    write_checkpoint(lazy(arrays()), tmp_path / "a", generation_config=wanted)
    assert load(tmp_path / "a").generation_config == wanted
    write_checkpoint(lazy(arrays()), tmp_path / "b", copy_from=tmp_path / "a")
    files = [tmp_path / f / "generation_config.json" for f in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_small_files_come_along_and_weights_do_not(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja"):
        (source / name).write_text(name)
    for name in ("model-00001-of-00009.safetensors", "README.md", "config.json"):
        (source / name).write_text(name)
    write_checkpoint(lazy(arrays()), tmp_path / "out", copy_from=source)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "tokenizer.json",
        "merges.txt",
        "spiece.model",
        "chat_template.jinja",
        "model.safetensors",
    }


def test_stale_shards_go_and_foreign_files_stay(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out", max_shard_size=1000)
    foreign = tmp_path / "out" / "runs" / "log.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    (tmp_path / "out" / "adapter_model.safetensors").write_text("mine too")
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "runs",
        "adapter_model.safetensors",
        "model.safetensors",
    }
    assert foreign.read_text() == "mine"
    assert contents(tmp_path / "out") == raw(arrays(1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_can_be_written_over_itself(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path, config={"a": 1})
    write_checkpoint(load(tmp_path), tmp_path, config={"a": 2}, copy_from=tmp_path)
    assert contents(tmp_path) == raw(arrays()) and load(tmp_path).config == {"a": 2}


def test_the_folder_that_is_the_working_directory_can_be_replaced(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    write_checkpoint(lazy(arrays(1)), ".")
    assert contents(".") == raw(arrays(1))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_an_error_at_any_moment_leaves_the_old_checkpoint(tmp_path, after):
    write_checkpoint(lazy(arrays()), tmp_path / "out", config={"old": 1}, max_shard_size=1000)
    left = [after]

    def stop(_):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(
            lazy(arrays(1)),
            tmp_path / "out",
            config={"new": 1},
            generation_config={"new": 1},
            max_shard_size=1000,
            progress=stop,
        )
    assert contents(tmp_path / "out") == raw(arrays())
    assert load(tmp_path / "out").config == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_killed_process_leaves_the_old_checkpoint(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out", config={"old": 1})
    code = f"""
import os, numpy as np
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.save import write_checkpoint
tensors = {{n: ArrayTensor(np.zeros(9)) for n in "ab"}}
write_checkpoint(tensors, {str(tmp_path / "out")!r}, config={{}}, progress=lambda _: os._exit(9))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert contents(tmp_path / "out") == raw(arrays())
    assert load(tmp_path / "out").config == {"old": 1}


def test_where_folders_cannot_swap_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr("flaxen.convert.swap._exchange", lambda a, b: False)
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays(1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_dtype_outside_the_format_is_refused_before_anything_is_written(tmp_path):
    tensors = lazy({"a": np.zeros(4, ml_dtypes.int4)})
    with pytest.raises(CheckpointError, match="'a' is int4"):
        write_checkpoint(tensors, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_not_overwritten(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(lazy(arrays()), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_writing_asks_for_small_boxes_only(tmp_path, monkeypatch):
    monkeypatch.setattr("flaxen.convert.formats.writing.CHUNK", 1000)
    asked = []

    class Watched(LazyTensor):
        shape, dtype = (50, 7, 11), np.dtype(np.int16)

        def fill(self, box, out):
            asked.append(out.nbytes)
            out[...] = np.arange(50 * 77, dtype=np.int16).reshape(self.shape)[box]

    write_checkpoint({"a": Watched()}, tmp_path)
    assert max(asked) <= 1000
    assert load(tmp_path)["a"].read().ravel().tolist() == list(range(50 * 77))
