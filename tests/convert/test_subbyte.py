"""Safetensors kinds of four and six bits, against their bits written out."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.subbyte import KINDS
from flaxen.convert.lazy import concrete
from flaxen.convert.save import write_checkpoint

WIDTH = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def stored(path, kind, codes):
    """A file with one tensor `a`: a stream of bits, the first value in the lowest ones."""
    bits = "".join(f"{code:0{WIDTH[kind]}b}"[::-1] for code in codes.reshape(-1).tolist())
    data = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    entry = {"dtype": kind, "shape": list(codes.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return data


def some_codes(kind, shape):
    return np.random.default_rng(0).integers(0, 2 ** WIDTH[kind], shape, np.uint8)


def test_two_values_of_four_bits_lie_low_half_first(tmp_path):
    assert stored(tmp_path / "x.safetensors", "F4", np.array([0x2, 0xF], np.uint8)) == b"\xf2"
    values = open_checkpoint(tmp_path / "x.safetensors")["a"].read()
    assert values.astype(np.float32).tolist() == [1.0, -6.0]


def test_values_of_six_bits_are_those_of_the_published_formats(tmp_path):
    stored(tmp_path / "x.safetensors", "F6_E2M3", np.array([0b011111, 1, 0b100001, 8], np.uint8))
    values = open_checkpoint(tmp_path / "x.safetensors")["a"].read()
    assert values.astype(np.float32).tolist() == [7.5, 0.125, -0.125, 1.0]
    stored(tmp_path / "x.safetensors", "F6_E3M2", np.array([0b011111, 1, 0b100001, 12], np.uint8))
    values = open_checkpoint(tmp_path / "x.safetensors")["a"].read()
    assert values.astype(np.float32).tolist() == [28.0, 0.0625, -0.0625, 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8,), (3, 16), (2, 3, 2, 2), (4, 5, 1)])
def test_any_box_has_its_values(tmp_path, kind, shape):
    if np.prod(shape) * WIDTH[kind] % 8:
        shape = (*shape, 4)
    codes = some_codes(kind, shape)
    stored(tmp_path / "x.safetensors", kind, codes)
    tensor = open_checkpoint(tmp_path / "x.safetensors")["a"]
    assert tensor.dtype == KINDS[kind] and tensor.shape == shape
    np.testing.assert_array_equal(tensor.read().view(np.uint8), codes)
    rng = np.random.default_rng(1)
    for _ in range(20):
        ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
        box = concrete([slice(*pair) for pair in ends], shape)
        np.testing.assert_array_equal(tensor.read(box).view(np.uint8), codes[box])


def test_a_box_reads_only_the_bytes_that_hold_it(tmp_path):
    stored(tmp_path / "x.safetensors", "F4", some_codes("F4", (8, 64)))
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    checkpoint["a"].read((slice(2, 4), slice(7, 11)))
    assert checkpoint.bytes_read == 2 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_written_again_the_bytes_are_the_same(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("flaxen.convert.formats.writing.CHUNK", 7)
    data = stored(tmp_path / "x.safetensors", kind, some_codes(kind, (6, 20)))
    tensors = open_checkpoint(tmp_path / "x.safetensors")
    write_checkpoint(tensors, tmp_path / "out")
    [(name, about)] = deserialize((tmp_path / "out" / "model.safetensors").read_bytes())
    assert (name, about["dtype"], about["shape"]) == ("a", kind, [6, 20])
    assert bytes(about["data"]) == data


def test_a_dtype_asked_for_converts_them(tmp_path):
    codes = some_codes("F4", (4, 4))
    stored(tmp_path / "x.safetensors", "F4", codes)
    write_checkpoint(
        open_checkpoint(tmp_path / "x.safetensors"), tmp_path / "out", dtype=np.dtype(np.float32)
    )
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "out")["a"].read(), expected)
