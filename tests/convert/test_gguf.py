"""GGUF files are read as the Hugging Face checkpoints they were made of."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from flaxen.convert.formats.gguf import open_gguf
from flaxen.core.errors import CheckpointError

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, HEAD_DIM = 32, 4, 2, 48, 7, 8
PLAIN = gguf.GGMLQuantizationType
HALVES = {  # where a block keeps its half-precision scales
    PLAIN.Q4_0: (0,),
    PLAIN.Q4_1: (0, 2),
    PLAIN.Q5_0: (0,),
    PLAIN.Q5_1: (0, 2),
    PLAIN.Q8_0: (0,),
    PLAIN.Q2_K: (80, 82),
    PLAIN.Q3_K: (108,),
    PLAIN.Q4_K: (0, 2),
    PLAIN.Q5_K: (0, 2),
    PLAIN.Q6_K: (208,),
}


def write(path: Path, arch: str, tensors: dict | None = None, extra=lambda writer: None) -> Path:
    """A tiny GGUF file; a tensor is an array, or (bytes, type)."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    extra(writer)
    base = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    for name, value in (base | (tensors or {})).items():
        raw, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: gguf.GGMLQuantizationType, *shape: int) -> np.ndarray:
    """Random stored bytes of a type, with finite scales."""
    rng = np.random.default_rng(int(kind))
    per, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // per, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(size=(*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


# Tensors


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


def test_a_read_touches_only_the_blocks_of_its_rows(tmp_path):
    raw = blocks(PLAIN.Q8_0, 40, 64)
    path = write(tmp_path / "a.gguf", "llama", {"blk.0.ffn_up.weight": (raw, PLAIN.Q8_0)})
    checkpoint = open_gguf(path)
    checkpoint["model.layers.0.mlp.up_proj.weight"].read((slice(4, 7), slice(32, 64)))
    assert checkpoint.bytes_read == 3 * 34


# Rows of q and k


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


def window(writer) -> None:
    writer.add_sliding_window(16)


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


# Configs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "head_dim": HEAD_DIM,
    "attention_bias": False,
    "mlp_bias": False,
}


def config(tmp_path, arch="llama", tensors=None, extra=lambda writer: None) -> dict:
    return open_gguf(write(tmp_path / "a.gguf", arch, tensors, extra)).config


def test_the_config_of_a_llama(tmp_path):
    assert config(tmp_path) == LLAMA


def test_a_llama_with_a_window_is_a_mistral(tmp_path):
    found = config(tmp_path, extra=window)
    assert found["model_type"] == "mistral"
    assert found["architectures"] == ["MistralForCausalLM"]
    assert found["sliding_window"] == 16


def test_qwen2_says_its_head_width_only_where_it_is_unusual(tmp_path):
    assert "head_dim" not in config(tmp_path, "qwen2")

    def wide(writer):
        writer.add_key_length(12)
        writer.add_value_length(12)

    assert config(tmp_path, "qwen2", extra=wide)["head_dim"] == 12


def test_qwen3_names_itself_and_its_heads(tmp_path):
    found = config(tmp_path, "qwen3", extra=lambda w: w.add_rope_freq_base(1e6))
    assert (found["model_type"], found["head_dim"]) == ("qwen3", HEAD_DIM)
    assert found["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}


def test_gemma3_gets_what_its_file_leaves_unsaid(tmp_path):
    def scaled(writer):
        window(writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    found = config(tmp_path, "gemma3", extra=scaled)
    assert found["model_type"] == "gemma3_text"
    assert found["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert found["sliding_window"] == 16
    assert found["layer_types"] == ["sliding_attention"]
    assert found["query_pre_attn_scalar"] == HEAD_DIM
    assert found["hidden_activation"] == "gelu_pytorch_tanh"


def test_a_head_of_its_own_means_untied(tmp_path):
    head = {"output.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    checkpoint = open_gguf(write(tmp_path / "a.gguf", "llama", head))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint["lm_head.weight"].shape == (VOCAB, HIDDEN)


def test_biases_show_in_the_config(tmp_path):
    bias = {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    assert config(tmp_path, tensors=bias)["attention_bias"] is True


def test_yarn_is_said_in_full(tmp_path):
    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    assert config(tmp_path, "qwen2", extra=yarn)["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def llama3_divisor(i: int, factor: float) -> float:
    """One frequency's divisor, in the words of the model's release."""
    wavelength = 2 * math.pi * 5e5 ** (2 * i / HEAD_DIM)
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192 / 1:
        return factor
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return 1 / ((1 - smooth) / factor + smooth)


def test_llama3_scaling_is_known_by_its_divisors(tmp_path):
    divisors = np.array([llama3_divisor(i, 32.0) for i in range(HEAD_DIM // 2)], np.float32)
    path = write(
        tmp_path / "a.gguf",
        "llama",
        {"rope_freqs.weight": divisors},
        lambda w: w.add_rope_freq_base(5e5),
    )
    checkpoint = open_gguf(path)
    assert list(checkpoint) == ["model.embed_tokens.weight"]
    assert checkpoint.config["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_of_another_kind_are_refused(tmp_path):
    odd = {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    with pytest.raises(CheckpointError, match="divisors"):
        config(tmp_path, tensors=odd)


def test_every_token_that_ends_an_answer_is_an_eos(tmp_path):
    def words(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "<eos>", "<|im_end|>", "<bos>", "b", "<eot>", "c"])
        writer.add_token_types([1, 3, 3, 3, 1, 3, 1])
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(5)

    checkpoint = open_gguf(write(tmp_path / "a.gguf", "llama", None, words))
    assert checkpoint.config["eos_token_id"] == 1
    assert checkpoint.generation_config == {"bos_token_id": 3, "eos_token_id": [1, 5, 2]}


# Refusals


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf", "llama", {"output_norm.weight": random(HIDDEN)})
    data = path.read_bytes()
    for length in range(0, len(data), 23):
        path.write_bytes(data[:length])
        refused(path, "ends at|cut short|not a GGUF|cannot be read|more than fit")
    path.write_bytes(data[:-1])
    refused(path, "cut short")


@pytest.mark.parametrize(
    ("at", "new", "match"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "more than fit"),
        (16, struct.pack("<Q", 1 << 40), "more than fit"),
        (24, struct.pack("<Q", 1 << 62), "ends at byte"),
    ],
    ids=["magic", "old", "big-endian", "tensors", "pairs", "string"],
)
def test_a_damaged_head_is_refused_before_anything_is_allocated(tmp_path, at, new, match):
    path = write(tmp_path / "a.gguf", "llama")
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    refused(path, match)


@pytest.mark.parametrize(
    ("arch", "tensors", "extra", "match"),
    [
        ("mamba", {}, None, "'mamba' cannot be read"),
        ("llama", {"blk.0.ffn_gate_inp.weight": random(4, 32)}, None, "ffn_gate_inp"),
        ("llama", {}, lambda w: w.add_expert_count(8), "mixtures of experts"),
        ("llama", {}, lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
        ("llama", {}, lambda w: w.add_rope_dimension_count(4), "rotate whole"),
        ("llama", {}, lambda w: w.add_string("llama.rope.freq_base", "x"), "positive number"),
        ("llama", {"blk.0.attn_k.weight": random(24, 32)}, None, "24 rows"),
        (
            "llama",
            {},
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "longrope",
        ),
    ],
)
def test_what_cannot_be_followed_exactly_is_refused(tmp_path, arch, tensors, extra, match):
    refused(write(tmp_path / "a.gguf", arch, tensors, extra or (lambda writer: None)), match)


def test_an_unknown_tensor_type_is_named(tmp_path):
    raw = np.zeros((4, 66), np.uint8)
    path = write(tmp_path / "a.gguf", "llama", {"output.weight": (raw, PLAIN.IQ2_XXS)})
    refused(path, "'output.weight' has type number 16")


def test_without_the_gguf_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    raw = blocks(PLAIN.Q6_K, 4, 256)
    plain = write(tmp_path / "a.gguf", "llama")
    other = write(tmp_path / "b.gguf", "llama", {"blk.0.ffn_up.weight": (raw, PLAIN.Q6_K)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert list(open_gguf(plain)) == ["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"pip install 'flaxen\[gguf\]'"):
        open_gguf(other)
