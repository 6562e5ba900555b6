"""Values of quantised blocks, against their published layout worked out number by number."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest
from gguf_files import HALVES, PLAIN, blocks, write

from flaxen.convert.formats.gguf import open_gguf
from flaxen.convert.formats.gguf_blocks import block_values
from flaxen.convert.formats.gguf_file import TYPES
from flaxen.convert.place import place


def has_values(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return gguf.GGML_QUANT_SIZES[kind][0] > 1


def test_every_type_that_can_be_dequantised_is_tested():
    assert set(HALVES) == {kind for kind in gguf.GGML_QUANT_SIZES if has_values(kind)}
    assert {TYPES[int(kind)].name for kind in HALVES} == {kind.name for kind in HALVES}


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_block_sizes_are_those_of_the_package(kind):
    stored = TYPES[int(kind)]
    assert (stored.block, stored.size) == gguf.GGML_QUANT_SIZES[kind]


def half(low: int, high: int) -> float:
    return float(np.array([low, high], np.uint8).view(np.float16)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_k(block: list[int]) -> list[float]:
    """256 values in 8 groups of 32, each with a 6-bit scale and a 6-bit minimum."""
    d, least = half(*block[0:2]), half(*block[2:4])
    packed, nibbles, values = block[4:16], block[16:144], []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            low = packed[group + 4]
            scale = (low & 15) | (packed[group - 4] >> 6) << 4
            minimum = (low >> 4) | (packed[group] >> 6) << 4
        for i in range(32):
            byte = nibbles[group // 2 * 32 + i]
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - least * minimum)
    return values


def q6_k(block: list[int]) -> list[float]:
    """256 values in 16 groups of 16: four bits in one place, two in another."""
    low, high, scales, d = block[:128], block[128:192], block[192:208], half(*block[208:210])
    values = []
    for i in range(256):
        part, inside = divmod(i, 128)
        quarter, at = divmod(inside, 32)
        nibble = low[64 * part + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
        bits = high[32 * part + at] >> 2 * quarter & 3
        values.append(d * signed(scales[i // 16]) * ((nibble | bits << 4) - 32))
    return values


@pytest.mark.parametrize(("kind", "by_hand"), [(PLAIN.Q4_K, q4_k), (PLAIN.Q6_K, q6_k)])
def test_k_quants_equal_their_layout_worked_out_by_hand(tmp_path, kind, by_hand):
    raw = blocks(kind, 6, 512)
    path = write(tmp_path / "a.gguf", "llama", {"output.weight": (raw, kind)})
    rows = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).tolist()
    expected = np.array([by_hand(row) for row in rows]).reshape(6, 512)
    np.testing.assert_allclose(
        open_gguf(path)["lm_head.weight"].read(), expected, rtol=1e-5, atol=1e-5
    )


def test_q8_k_is_a_float_times_signed_bytes():
    block = np.zeros((2, 292), np.uint8)
    block[:, :4] = np.array([[0.5], [-2.0]], np.float32).view(np.uint8)
    block[:, 4:260] = np.arange(-128, 128, dtype=np.int8).view(np.uint8)
    expected = np.outer([0.5, -2.0], np.arange(-128, 128))
    np.testing.assert_array_equal(block_values(TYPES[15])(block), expected)


def test_devices_get_their_parts_of_quantised_tensors_from_threads(tmp_path, monkeypatch):
    """No more than a chunk of values is made at once, whatever the tensor's size."""
    kinds = {"ffn_up": PLAIN.Q4_K, "ffn_gate": PLAIN.IQ4_XS, "ffn_down": PLAIN.Q6_K}
    raw = {name: blocks(kind, 64, 512) for name, kind in kinds.items()}
    stored = {f"blk.0.{name}.weight": (raw[name], kind) for name, kind in kinds.items()}
    tensors = dict(open_gguf(write(tmp_path / "a.gguf", "llama", stored)))
    monkeypatch.setattr("flaxen.convert.formats.gguf_blocks.CHUNK", 8 * 512)
    seen = []
    for tensor in tensors.values():
        make = getattr(tensor, "values", None)
        if make:
            tensor.values = lambda part, make=make: seen.append(len(part)) or make(part)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = jax.NamedSharding(mesh, jax.P("a"))
    names = {"ffn_up": "up_proj", "ffn_gate": "gate_proj", "ffn_down": "down_proj"}
    wanted = {key: tensors[f"model.layers.0.mlp.{hub}.weight"] for key, hub in names.items()}
    placed = place(wanted, dict.fromkeys(wanted, sharding))
    for name, kind in kinds.items():
        np.testing.assert_array_equal(placed[name], gguf.dequantize(raw[name], kind))
    assert len(seen) == 3 * 4 * 2
    assert max(seen) == 8 * 512 // 256
