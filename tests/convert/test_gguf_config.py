"""The config of a GGUF file, and what is refused."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PLAIN,
    VOCAB,
    blocks,
    random,
    window,
    write,
)

from flaxen.convert.formats.gguf import open_gguf
from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.core.errors import CheckpointError

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


@pytest.mark.parametrize(
    "key, value, match",
    [
        ("split.count", [2, 2], "split.count is .*expected one value"),
        ("split.count", "x", "one of x parts"),
        ("llama.expert_count", [0, 0], "expert_count is .*expected one value"),
        ("llama.attention.key_length", [8, 4], "key_length is .*expected one positive number"),
        ("llama.attention.value_length", [8, 8], "value_length is .*expected one value"),
        ("llama.feed_forward_length", ["a"], "expected one positive number"),
        ("llama.rope.scaling.type", [1, 2], "expected one value"),
        ("tokenizer.ggml.eos_token_id", [1, 2], "eos_token_id is .*expected one value"),
        ("tokenizer.ggml.eot_token_id", "x", "eot_token_id is 'x'; expected the number"),
        ("tokenizer.ggml.tokens", 5, "tokens is 5; expected a list"),
        ("tokenizer.ggml.token_type", "x", "token_type is 'x'; expected a list"),
    ],
)
def test_metadata_of_another_type_is_refused_by_its_key(tmp_path, monkeypatch, key, value, match):
    path = write(tmp_path / "a.gguf", "llama")
    found = np.array(value) if isinstance(value, list) and type(value[0]) is int else value
    read = GgufFile.__init__

    def told(self, path):
        read(self, path)
        self.metadata[key] = found

    monkeypatch.setattr(GgufFile, "__init__", told)
    refused(path, match)


def test_a_file_that_was_split_and_merged_again_reads(tmp_path):
    path = write(tmp_path / "a.gguf", "llama", extra=lambda w: w.add_uint16("split.count", 0))
    assert "model.embed_tokens.weight" in open_gguf(path)


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
