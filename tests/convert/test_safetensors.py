"""The safetensors reader, against the format's own library and against damaged files."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.safetensors import DTYPES
from flaxen.core.errors import CheckpointError


def write(path, header, data=b"", pad=0):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_files_of_the_reference_library_read_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "f64": rng.normal(size=(3, 5)),
        "f16": rng.normal(size=(7,)).astype(np.float16),
        "bf16": rng.normal(size=(4, 6, 2)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(5, np.int32),
        "empty": np.zeros((0, 3), np.float32),
        "bool": np.array([True, False]),
    }
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == set(arrays) and checkpoint.metadata == {"format": "pt"}
    for name, array in arrays.items():
        got = checkpoint[name].read()
        assert got.dtype == array.dtype and got.shape == array.shape
        assert got.tobytes() == array.tobytes()
    assert checkpoint.bytes_read == sum(a.nbytes for a in arrays.values())


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_every_dtype_of_the_format_keeps_its_bytes(tmp_path, kind):
    dtype = DTYPES[kind]
    data = np.arange(6 * dtype.itemsize, dtype=np.uint8) % 2
    write(tmp_path / "x.safetensors", {"a": entry(kind, [2, 3], 0, data.nbytes)}, data.tobytes())
    tensor = open_checkpoint(tmp_path / "x.safetensors")["a"]
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.read().view(np.uint8).reshape(-1), data)
    column = tensor.read((slice(0, 2), slice(1, 2)))
    assert column.tobytes() == data.view(dtype).reshape(2, 3)[:, 1:2].tobytes()


def test_only_the_bytes_of_a_box_are_read(tmp_path):
    save_file({"a": np.zeros((100, 40), np.float32)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint["a"].read((slice(10, 20), slice(0, 40)))
    checkpoint["a"].read((slice(0, 100), slice(3, 4)))
    assert checkpoint.bytes_read == 4 * (10 * 40 + 100)


def test_aligned_data_is_seen_without_copying_and_cannot_be_written(tmp_path):
    values = np.arange(32, dtype=np.float32)
    header = {"a": entry("F32", [32], 0, 128)}
    pad = -(8 + len(json.dumps(header))) % 64
    path = write(tmp_path / "a.safetensors", header, values.tobytes(), pad)
    view = open_checkpoint(path)["a"].view()
    assert view is not None and not view.flags.writeable
    np.testing.assert_array_equal(view, values)
    path = write(tmp_path / "b.safetensors", header, values.tobytes(), pad + 8)
    assert open_checkpoint(path)["a"].view() is None


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("I8", [4], 8, 12)}

DAMAGED = {
    "empty file": (b"", "is empty"),
    "half a header length": (b"\1\0", "header should have"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "header should have 1000"),
    "absurd header length": (struct.pack("<Q", 2**63) + b"{}", "header should have"),
    "header is no JSON": (struct.pack("<Q", 3) + b"{x}", "no JSON"),
    "header is a list": (struct.pack("<Q", 2) + b"[]", "no JSON object"),
}
BAD_HEADERS = {
    "data cut short": (GOOD, 11, "speaks of 12 bytes of data, it has 11"),
    "data too long": (GOOD, 13, "it has 13"),
    "overlap": (GOOD | {"b": entry("I8", [4], 6, 10)}, 10, "'b' overlaps"),
    "hole": (GOOD | {"b": entry("I8", [4], 9, 13)}, 13, "'b' leaves a hole"),
    "shape and bytes differ": ({"a": entry("F32", [3], 0, 8)}, 8, "needs 12 bytes, has 8"),
    "offsets backwards": ({"a": entry("F32", [2], 8, 0)}, 8, "needs 8 bytes, has -8"),
    "negative shape": ({"a": entry("F32", [-2], 0, 8)}, 8, "malformed"),
    "more axes than an array has": ({"a": entry("F32", [1] * 65, 0, 4)}, 4, "malformed"),
    "no values, and no end of rows": ({"a": entry("F32", [2**62, 0], 0, 0)}, 0, "malformed"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "malformed"),
    "unknown dtype": ({"a": entry("Q7", [2], 0, 8)}, 8, "unknown dtype 'Q7'"),
    "packed dtype": ({"a": entry("F4", [2], 0, 1)}, 1, "packs several values"),
    "dtype is a list": ({"a": entry(["F32"], [2], 0, 8)}, 8, "malformed"),
    "metadata is a list": ({"__metadata__": [1]} | GOOD, 12, "__metadata__ is"),
    "nested too deep": (b"[" * 100_000, 0, "no JSON"),
    "a number of too many digits": (b'{"a": ' + b"9" * 5000 + b"}", 0, "no JSON"),
    "a key twice": (b'{"a": {"dtype": "I8"}, "a": {"dtype": "I8"}}', 0, "'a' stands twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path, case):
    raw, message = DAMAGED[case]
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_an_inconsistent_header_is_refused_by_name(tmp_path, case):
    header, size, message = BAD_HEADERS[case]
    write(tmp_path / "model.safetensors", header, b"\0" * size)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        open_checkpoint(tmp_path)


def sharded(folder, weight_map=None):
    save_file({"a": np.full(3, 1, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.full(3, 2, np.float32)}, folder / "model-00002-of-00002.safetensors")
    save_file({"a": np.full(3, 9, np.float32)}, folder / "stray.safetensors")
    default = {k: f"model-0000{i}-of-00002.safetensors" for k, i in (("a", 1), ("b", 2))}
    index = {"metadata": {}, "weight_map": weight_map or default}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_files_outside_the_index_are_ignored(tmp_path):
    checkpoint = open_checkpoint(sharded(tmp_path))
    assert {k: v.read()[0] for k, v in checkpoint.items()} == {"a": 1, "b": 2}


def test_an_absent_shard_is_named(tmp_path):
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not there: model-00002-of-00002"):
        open_checkpoint(tmp_path)


def test_a_shard_shorter_than_its_header_is_named(tmp_path):
    shard = sharded(tmp_path) / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is damaged"):
        open_checkpoint(tmp_path)


def test_a_tensor_absent_from_its_shard_is_named(tmp_path):
    sharded(tmp_path, {"a": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="'a' is in model-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../other.safetensors", 3, None])
def test_an_index_cannot_point_outside_its_folder(tmp_path, file):
    with pytest.raises(CheckpointError, match="no file name"):
        open_checkpoint(sharded(tmp_path, {"a": file}))


@pytest.mark.parametrize("file", ["n" * 300, "x\0y", "\ud800", ".."])
def test_a_name_that_no_file_can_have_is_not_there(tmp_path, file):
    with pytest.raises(CheckpointError, match="not there"):
        open_checkpoint(sharded(tmp_path, {"a": file}))


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"only notes\.txt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "a" * 5000, "a\0b"])
def test_what_is_neither_path_nor_hub_id_is_refused(path):
    with pytest.raises(CheckpointError, match="no hub id"):
        open_checkpoint(path)


def test_config_files_stand_beside_the_tensors(tmp_path):
    save_file({"a": np.zeros(1, np.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config is None and checkpoint.folder == tmp_path
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ['{"a":' * 20_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_cannot_be_read_is_refused_by_name(tmp_path, text):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        open_checkpoint(tmp_path)
