"""Folders we write, against the format's own library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_arrays import BF16, arrays, contents, lazy, raw

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.writing import Layout
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.save import write_checkpoint
from flaxen.core.errors import CheckpointError


def test_the_reference_library_reads_the_same_bytes(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    assert raw(load_file(tmp_path / "out" / "model.safetensors")) == raw(arrays())
    assert contents(tmp_path / "out") == raw(arrays())
    assert open_checkpoint(tmp_path / "out").metadata == {"format": "pt"}


def test_own_files_load_as_views(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
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
    assert all(open_checkpoint(tmp_path / f).metadata == {"format": "pt"} for f in files)
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


@pytest.mark.parametrize(("before", "after"), [(np.float32, BF16), (BF16, np.float32)])
def test_floats_are_converted_and_the_config_says_so(tmp_path, before, after):
    values = np.random.default_rng(0).normal(size=(9, 7)).astype(before)
    live = {"w": values.copy(), "i": np.arange(5, dtype=np.int32), "b": np.array([True])}
    config = {"torch_dtype": np.dtype(before).name, "text_config": {"dtype": "float16"}}
    write_checkpoint(lazy(live), tmp_path, config=config, dtype=after)
    saved = open_checkpoint(tmp_path)
    assert saved["w"].read().tobytes() == values.astype(after).tobytes()
    assert (saved["i"].dtype, saved["b"].dtype) == (np.int32, np.bool_)
    name = np.dtype(after).name
    assert saved.config == {"torch_dtype": name, "text_config": {"dtype": name}}
    assert live["w"].dtype == before and live["w"].tobytes() == values.tobytes()
    assert config["torch_dtype"] == np.dtype(before).name


def test_without_a_request_the_config_follows_the_weights(tmp_path):
    tensors = lazy({"w": np.ones((4, 4), BF16), "norm": np.ones(4, np.float32)})
    write_checkpoint(tensors, tmp_path / "a", config={"dtype": "float16"})
    assert open_checkpoint(tmp_path / "a").config == {"dtype": "bfloat16"}
    write_checkpoint(tensors, tmp_path / "b", config={"dtype": "float32"})
    assert open_checkpoint(tmp_path / "b").config == {"dtype": "float32"}


def test_a_contradictory_generation_config_is_saved_as_it_is(tmp_path):
    wanted = {"do_sample": False, "temperature": 1e-6, "top_p": None}
    write_checkpoint(lazy(arrays()), tmp_path / "a", generation_config=wanted)
    assert open_checkpoint(tmp_path / "a").generation_config == wanted
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


def test_parts_that_are_scattered_over_every_tensor_make_one_file(tmp_path):
    """One writes every third element, another the rest."""
    tensors, path, written = arrays(), tmp_path / "model.safetensors", 0
    layout = Layout.of(lazy(tensors), {})
    layout.begin(path)
    for third in (True, False):
        mine, known = {}, {}
        for name, a in tensors.items():
            mine[name] = np.array((np.arange(a.size).reshape(a.shape) % 3 == 0) == third)
            known[name] = np.array(np.where(mine[name], a, 0), a.dtype)
        written += layout.fill(path, lazy(known), lazy(mine), None)
    assert written == sum(a.nbytes for a in tensors.values())
    assert contents(tmp_path) == raw(tensors)


def test_a_dtype_outside_the_format_is_refused_before_anything_is_written(tmp_path):
    tensors = lazy({"a": np.zeros(4, ml_dtypes.int4)})
    with pytest.raises(CheckpointError, match="'a' is int4"):
        write_checkpoint(tensors, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    assert open_checkpoint(tmp_path)["a"].read().ravel().tolist() == list(range(50 * 77))


SAVING = """
import pathlib, sys
sys.path.append(sys.argv[1])
from killed_saves import Constant, write_checkpoint

def memory(what):
    return int(pathlib.Path("/proc/self/status").read_text().split(what)[1].split()[0]) << 10

write_checkpoint({"w": Constant(1, 10)}, sys.argv[2])
before = memory("VmRSS:")
write_checkpoint({n: Constant(2, 8 << 10) for n in "abc"}, sys.argv[2])
print(memory("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_writing_takes_a_chunk_of_memory(tmp_path):
    """Three tensors of 32 MB, the memory of one chunk of 16 MB and little more."""
    command = [sys.executable, "-c", SAVING, Path(__file__).parent.parent, tmp_path / "out"]
    output = subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert int(output.stdout) <= (16 << 20) + (8 << 20)
