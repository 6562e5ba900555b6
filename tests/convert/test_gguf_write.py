"""Hugging Face models written as GGUF files, read back and by the gguf package."""

from __future__ import annotations

import gguf
import golden
import numpy as np
import pytest
from gguf_files import PLAIN, random

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.gguf import open_gguf
from flaxen.convert.formats.gguf_blocks import q8_0_blocks
from flaxen.convert.formats.gguf_write import write_gguf
from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import CheckpointError

MODELS = [
    "llama",
    "llama_rope_linear",
    "llama_rope_llama3",
    "llama_rope_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
]


def model(name: str) -> tuple[dict[str, LazyTensor], dict]:
    case = golden.case(name)
    config = case.config
    if name == "gemma3_text":
        config["query_pre_attn_scalar"] = config["head_dim"]
    return {key: ArrayTensor(value) for key, value in case.weights.items()}, config


def tiny(**tensors: np.ndarray) -> tuple[dict[str, LazyTensor], dict]:
    """A llama of one embedding and the tensors of its layer 0, by their last names."""
    _, config = model("llama")
    named = {f"model.layers.0.{key.replace('__', '.')}": t for key, t in tensors.items()}
    named["model.embed_tokens.weight"] = np.zeros((7, 64), np.float32)
    return {k: ArrayTensor(t) for k, t in named.items()}, config | {"tie_word_embeddings": True}


def stored(path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_come_back_from_a_file(tmp_path, name):
    tensors, config = model(name)
    write_gguf(tensors, config, tmp_path / "a.gguf", kind="F32")
    found = open_gguf(tmp_path / "a.gguf")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        if name == "gemma3_text" and key.endswith("norm.weight"):
            # Stored as 1 + w: a float32 near 1 keeps so much of w.
            np.testing.assert_allclose(found[key].read(), tensor.read(), atol=2**-23)
        else:
            np.testing.assert_array_equal(found[key].read(), tensor.read())
    assert {key: config[key] for key in found.config if key in config} == {
        key: value for key, value in found.config.items() if key in config
    }


@pytest.mark.parametrize(("part", "heads"), [("q", 4), ("k", 2)])
def test_rows_of_a_llamas_q_and_k_stand_in_pairs(tmp_path, part, heads):
    tensors, config = model("llama")
    write_gguf(tensors, config, tmp_path / "a.gguf", kind="F32")
    weight = tensors[f"model.layers.1.self_attn.{part}_proj.weight"].read()
    pairs = weight.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(
        stored(tmp_path / "a.gguf")[f"blk.1.attn_{part}.weight"].data, pairs
    )


def test_gemmas_norms_hold_the_one_that_is_added(tmp_path):
    tensors, config = model("gemma3_text")
    write_gguf(tensors, config, tmp_path / "a.gguf")
    norm = tensors["model.layers.0.post_feedforward_layernorm.weight"].read()
    found = stored(tmp_path / "a.gguf")["blk.0.post_ffw_norm.weight"]
    np.testing.assert_array_equal(found.data, norm + 1)
    assert found.tensor_type == PLAIN.F32


@pytest.mark.parametrize(("kind", "number"), [("F32", 0), ("F16", 1), ("BF16", 32), ("Q8_0", 7)])
def test_matrices_are_of_the_kind_asked_for_and_norms_are_float32(tmp_path, kind, number):
    matrix, norm = random(6, 64), random(64)
    path = tmp_path / "a.gguf"
    write_gguf(*tiny(mlp__up_proj__weight=matrix, input_layernorm__weight=norm), path, kind=kind)
    found = stored(path)
    assert found["blk.0.ffn_up.weight"].tensor_type == PLAIN[kind]
    expected = gguf.quantize(matrix, PLAIN[kind])
    assert found["blk.0.ffn_up.weight"].data.tobytes() == expected.tobytes()
    assert found["blk.0.attn_norm.weight"].data.tobytes() == norm.tobytes()
    assert gguf.GGUFReader(path).get_field("general.file_type").contents() == number
    assert all(tensor.data_offset % 32 == 0 for tensor in found.values())


def test_rows_that_do_not_divide_into_blocks_are_stored_as_float16(tmp_path):
    matrix = random(6, 40)
    write_gguf(*tiny(mlp__down_proj__weight=matrix), tmp_path / "a.gguf", kind="Q8_0")
    found = stored(tmp_path / "a.gguf")["blk.0.ffn_down.weight"]
    assert found.tensor_type == PLAIN.F16
    np.testing.assert_array_equal(found.data, matrix.astype(np.float16))


def test_q8_0_makes_the_bytes_of_the_reference():
    values = random(200, 32) * 10.0 ** np.linspace(-20, 6, 200)[:, None]
    values[0] = 0
    values[1] = np.arange(-16, 16) + 0.5  # halves
    values[1, 0] = 127
    values[2, 3] = -0.0
    values = values.astype(np.float32)
    np.testing.assert_array_equal(q8_0_blocks(values), gguf.quantize(values, PLAIN.Q8_0))


def test_a_tied_head_and_computed_frequencies_are_left_out(tmp_path):
    tensors, config = tiny()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ArrayTensor(random(8))
    write_gguf(tensors, config, tmp_path / "a.gguf")
    assert list(stored(tmp_path / "a.gguf")) == ["token_embd.weight"]


class Watched(LazyTensor):
    """Remembers how much was asked of it at once."""

    def __init__(self, shape):
        self.shape, self.dtype, self.largest = shape, np.dtype(np.float32), 0

    def fill(self, box, out):
        self.largest = max(self.largest, out.nbytes)
        out[...] = 1


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_no_more_than_a_chunk_is_in_memory(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("flaxen.convert.formats.gguf_write.CHUNK", 2048)
    tensors, config = tiny()
    # Read through the rearrangement of q's rows as well.
    q, up = Watched((64, 64)), Watched((640, 64))
    tensors["model.layers.0.self_attn.q_proj.weight"] = q
    tensors["model.layers.0.mlp.up_proj.weight"] = up
    written = []
    write_gguf(tensors, config, tmp_path / "a.gguf", kind=kind, progress=written.append)
    assert 0 < q.largest <= 4 * 2048 and 0 < up.largest <= 4 * 2048
    assert max(written) <= 2048
    assert sum(written) == sum(tensor.n_bytes for tensor in stored(tmp_path / "a.gguf").values())


class Broken(Watched):
    def fill(self, box, out):
        raise RuntimeError("the disk it is on is gone")


def test_a_file_changes_only_when_it_is_complete(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(*tiny(), path)
    before = path.read_bytes()
    tensors, config = tiny()
    tensors["model.norm.weight"] = Broken((64,))
    with pytest.raises(RuntimeError):
        write_gguf(tensors, config, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("kind", "value"), [("F16", -7e4), ("F16", np.nan), ("Q8_0", 1e7)])
def test_values_that_the_file_cannot_hold_are_refused(tmp_path, kind, value):
    matrix = random(6, 64)
    matrix[3, 5] = value
    tensors, config = tiny(mlp__up_proj__weight=matrix)
    with pytest.raises(CheckpointError, match=f"'blk.0.ffn_up.weight' has values that {kind}"):
        write_gguf(tensors, config, tmp_path / "a.gguf", kind=kind)
    assert not list(tmp_path.iterdir())
    write_gguf(tensors, config, tmp_path / "a.gguf", kind="BF16")


def test_the_metadata_of_a_gguf_source_is_kept_as_it_is(tmp_path):
    tensors, config = tiny()
    source = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    source.add_name("Tiny")
    source.add_tokenizer_model("gpt2")
    source.add_tokenizer_pre("smollm")
    source.add_token_list(list("abcdefg"))
    source.add_token_types([1, 1, 1, 1, 1, 3, 3])
    source.add_token_scores([0.5] * 7)
    source.add_token_merges(["a b"])
    source.add_bos_token_id(5)
    source.add_add_bos_token(True)
    source.write_header_to_file()
    source.write_kv_data_to_file()
    source.close()
    from flaxen.convert.formats.gguf_file import GgufFile

    metadata = GgufFile(tmp_path / "source.gguf").metadata
    write_gguf(tensors, config, tmp_path / "a.gguf", metadata=metadata)
    old, new = (gguf.GGUFReader(tmp_path / name).fields for name in ("source.gguf", "a.gguf"))
    kept = [key for key in old if key.startswith("tokenizer.") or key == "general.name"]
    assert len(kept) == 9
    for key in kept:
        assert (new[key].types, new[key].contents()) == (old[key].types, old[key].contents())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "phi3"}, "'phi3' cannot be written as GGUF"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"num_hidden_layers": None}, "does not say num_hidden_layers"),
        ({"tie_word_embeddings": False}, "no 'lm_head.weight'"),
    ],
)
def test_a_model_that_gguf_cannot_say_is_refused(tmp_path, change, match):
    tensors, config = tiny()
    with pytest.raises(CheckpointError, match=match):
        write_gguf(tensors, config | change, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"query_pre_attn_scalar": 99}, "query_pre_attn_scalar=99"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3]}, "layer_types"),
    ],
)
def test_a_gemma_that_gguf_cannot_say_is_refused(tmp_path, change, match):
    tensors, config = model("gemma3_text")
    with pytest.raises(CheckpointError, match=match):
        write_gguf(tensors, config | change, tmp_path / "a.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path):
    tensors, config = tiny(mlp__experts__0__up_proj__weight=random(4, 64))
    with pytest.raises(CheckpointError, match="'model.layers.0.mlp.experts.0.up_proj.weight' has"):
        write_gguf(tensors, config, tmp_path / "a.gguf")


def test_rows_that_do_not_fit_the_heads_are_refused(tmp_path):
    tensors, config = tiny(self_attn__k_proj__weight=random(48, 64))
    with pytest.raises(CheckpointError, match="has 48 rows.*make 32"):
        write_gguf(tensors, config, tmp_path / "a.gguf")


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(CheckpointError, match="Did you mean 'Q8_0'"):
        write_gguf(*tiny(), tmp_path / "a.gguf", kind="Q8")


def test_rope_settings_in_older_keys_are_read_too(tmp_path):
    tensors, config = tiny()
    older = {k: v for k, v in config.items() if k != "rope_parameters"}
    older |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    write_gguf(tensors, older, tmp_path / "a.gguf")
    assert open_gguf(tmp_path / "a.gguf").config["rope_parameters"] == {
        "rope_theta": 5000.0,
        "rope_type": "linear",
        "factor": 2.0,
    }
