"""GGUF tensors are read as those of the Hugging Face model they were made of."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf_files import (
    HALVES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PLAIN,
    blocks,
    random,
    window,
    write,
)

from flaxen.convert.formats.gguf import open_gguf


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_any_box_of_a_quantised_tensor_is_that_box_of_the_whole(tmp_path, kind):
    raw = blocks(kind, 40, 512)
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.ffn_up.weight": (raw, kind)})
    whole = gguf.dequantize(raw, kind)
    tensor = open_gguf(path)["model.layers.0.mlp.up_proj.weight"]
    assert tensor.shape == (40, 512)
    np.testing.assert_array_equal(tensor.read(), whole)
    for box in [np.s_[3:17, 0:512], np.s_[0:40, 250:300], np.s_[39:40, 511:512], np.s_[5:5, 0:9]]:
        np.testing.assert_array_equal(tensor.read(box), whole[box])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("F64", "f8")]
)
def test_unquantised_tensors_keep_their_bytes_and_dtype(tmp_path, kind, dtype):
    import ml_dtypes  # noqa: F401  (names bfloat16)

    values = random(6, HIDDEN).astype(dtype)
    raw = values.view(np.uint8) if kind == "BF16" else values
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.ffn_up.weight": (raw, PLAIN[kind])})
    tensor = open_gguf(path)["model.layers.0.mlp.up_proj.weight"]
    assert tensor.dtype == values.dtype
    assert tensor.read((slice(2, 5), slice(1, 9))).tobytes() == values[2:5, 1:9].tobytes()


def test_a_chunk_border_inside_a_tensor_leaves_no_mark(tmp_path, monkeypatch):
    raw = blocks(PLAIN.Q4_1, 10, 64)
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.ffn_up.weight": (raw, PLAIN.Q4_1)})
    monkeypatch.setattr("flaxen.convert.formats.gguf_blocks.CHUNK", 3 * 64)
    tensor = open_gguf(path)["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(tensor.read(), gguf.dequantize(raw, PLAIN.Q4_1))


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_read_touches_only_the_blocks_of_its_box(tmp_path, kind):
    per, size = gguf.GGML_QUANT_SIZES[kind]
    raw = blocks(kind, 40, 3 * per)
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.ffn_up.weight": (raw, kind)})
    checkpoint = open_gguf(path)
    checkpoint["model.layers.0.mlp.up_proj.weight"].read((slice(4, 7), slice(per, per + 1)))
    assert checkpoint.bytes_read == 3 * size


def to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a converter to GGUF does to the rows of q and k of a llama."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_rows_of_q_and_k_come_back_bitwise(tmp_path, part, heads, kind):
    shape = (heads * HEAD_DIM, HIDDEN) if kind == "weight" else (heads * HEAD_DIM,)
    weight = random(*shape)
    stored = {f"blk.0.attn_{part}.{kind}": to_pairs(weight, heads)}
    tensor = open_gguf(write(tmp_path / "a.gguf", "llama", stored))[
        f"model.layers.0.self_attn.{part}_proj.{kind}"
    ]
    np.testing.assert_array_equal(tensor.read(), weight)
    box = tuple(slice(3, 13) for _ in shape)
    np.testing.assert_array_equal(tensor.read(box), weight[box])


def turned_pairs(x: np.ndarray, position: int) -> np.ndarray:
    """Rotate neighbouring channels, as the runtime of such files does."""
    angle = position * 1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b = x[..., 0::2], x[..., 1::2]
    turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    return np.stack(turned, -1).reshape(x.shape)


def turned_halves(x: np.ndarray, position: int) -> np.ndarray:
    """Rotate the two halves of a head, as Hugging Face models do."""
    angle = position * 1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


@pytest.mark.parametrize("position", [0, 30])
def test_scores_by_halves_of_loaded_rows_equal_scores_by_pairs_of_stored_rows(tmp_path, position):
    q, k = random(HEADS * HEAD_DIM, HIDDEN), random(KV_HEADS * HEAD_DIM, HIDDEN)[::-1].copy()
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.attn_q.weight": q, "blk.0.attn_k.weight": k})
    checkpoint = open_gguf(path)
    loaded_q, loaded_k = (
        checkpoint[f"model.layers.0.self_attn.{part}_proj.weight"].read() for part in "qk"
    )
    x = random(HIDDEN).astype(np.float64)

    def scores(turn, q, k):
        query = turn((q.astype(np.float64) @ x).reshape(KV_HEADS, -1, HEAD_DIM), position)
        key = turn((k.astype(np.float64) @ x).reshape(KV_HEADS, 1, HEAD_DIM), 2)
        return np.einsum("kgh,kgh->kg", query, np.broadcast_to(key, query.shape))

    np.testing.assert_allclose(
        scores(turned_halves, loaded_q, loaded_k), scores(turned_pairs, q, k), rtol=1e-12
    )


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_store_rows_as_they_are(tmp_path, arch):
    weight = random(HEADS * HEAD_DIM, HIDDEN)
    path = write(tmp_path / "a.gguf", arch, {"blk.0.attn_q.weight": weight}, window)
    tensor = open_gguf(path)["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(tensor.read(), weight)


def test_gemma3_norms_lose_the_one_that_the_file_adds(tmp_path):
    hub = np.array([0.5, -0.25, 3.0, 0.0] * 8, np.float32)
    stored = {"blk.0.post_ffw_norm.weight": hub + 1, "blk.0.attn_q_norm.weight": hub[:8] + 1}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", "gemma3", stored, window))
    name = "model.layers.0.post_feedforward_layernorm.weight"
    np.testing.assert_array_equal(checkpoint[name].read(), hub)
    np.testing.assert_array_equal(checkpoint[name].read((slice(1, 3),)), hub[1:3])
    np.testing.assert_array_equal(
        checkpoint["model.layers.0.self_attn.q_norm.weight"].read(), hub[:8]
    )


def test_gemma3_tells_its_four_norms_of_a_layer_apart(tmp_path):
    norms = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    stored = {f"blk.0.{part}.weight": np.full(4, i, np.float32) for i, part in enumerate(norms)}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", "gemma3", stored, window))
    for i, part in enumerate(norms.values()):
        assert checkpoint[f"model.layers.0.{part}.weight"].read()[0] == i - 1
