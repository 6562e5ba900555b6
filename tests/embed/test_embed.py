"""Vectors of texts: every way of pooling against NumPy, folders, prompts, batches, the command."""

from __future__ import annotations

import io
import json

import encoder_cases
import golden
import numpy as np
import pytest
from safetensors.numpy import save_file
from words import word_tokenizer

import flaxen
from flaxen import CheckpointError, ConfigError, InputError
from flaxen.cli import main
from flaxen.cli.output import print_json
from flaxen.embed import recipe_of
from flaxen.embed.recipe import Recipe
from flaxen.embed.run import NO_LIMIT, _limit, _vectors

CASE = encoder_cases.case("bert/bare")
TEXTS = ["a b c", "d", "a b c d a b c d w9 w10", "", "assistant user a", "w12 d w20"]
FLAGS = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"]


def folder(path, pooling, *more, prompts=None, **limits):
    """A sentence-transformers folder; `more` are further modules: (kind, config, tensors)."""
    encoder_cases.write(path, CASE.config, CASE.weights)
    word_tokenizer(41).save_pretrained(path)
    modules = [("Transformer", "", None, None), ("Pooling", "1_Pooling", pooling, None)]
    modules += [(k, f"{i}_{k}", c, t) for i, (k, c, t) in enumerate(more, 2)]
    listed = []
    for i, (kind, where, config, tensors) in enumerate(modules):
        listed.append({"idx": i, "path": where, "type": f"sentence_transformers.models.{kind}"})
        (path / where).mkdir(exist_ok=True)
        if config is not None:
            (path / where / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, path / where / "model.safetensors")
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "sentence_bert_config.json").write_text(json.dumps(limits))
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return path


def flags(*on):
    return {f"pooling_mode_{name}": name in on for name in [*FLAGS, "lasttoken"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return flaxen.load(folder(tmp_path_factory.mktemp("mean"), flags("mean_tokens")))


def states(model, text):
    """Of one text alone, (T, D)."""
    ids = np.array([flaxen.text.encode(word_tokenizer(41), text)], np.int32)
    return np.asarray(model(ids).last_hidden_state, np.float64)[0]


POOLED = {
    "cls_token": lambda x: x[0],
    "max_tokens": lambda x: x.max(0),
    "mean_tokens": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean_tokens": lambda x: np.arange(1, len(x) + 1) @ x / np.arange(len(x) + 1).sum(),
    "lasttoken": lambda x: x[-1],
}


@pytest.mark.parametrize("way", POOLED)
def test_pooling(way, tmp_path):
    model = flaxen.load(folder(tmp_path, flags(way)))
    got = model.embed(TEXTS[:3], batch_size=2)
    want = np.stack([POOLED[way](states(model, text)) for text in TEXTS[:3]])
    assert (got.dtype, got.shape) == (np.float32, (3, 32))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_several_poolings_dense_layers_and_length_one(tmp_path):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(5, 64)), rng.normal(size=5)
    dense = {"in_features": 64, "out_features": 5, "activation_function": "torch.nn.Tanh"}
    tensors = {"linear.weight": weight, "linear.bias": bias}
    tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
    both = flags("mean_tokens", "cls_token")
    model = flaxen.load(
        folder(tmp_path, both, ("Dense", dense, tensors), ("Normalize", None, None))
    )
    x = states(model, "a b c")
    y = np.tanh(np.concatenate([x[0], x.mean(0)]) @ weight.T + bias)
    got = model.embed("a b c")
    np.testing.assert_allclose(got, y / np.linalg.norm(y), atol=2e-5)
    model.save(tmp_path / "back")
    np.testing.assert_array_equal(flaxen.load(tmp_path / "back").embed("a b c"), got)


def test_batches_and_order_change_nothing_and_few_programs_are_compiled(model):
    want = np.stack([model.embed(text) for text in TEXTS])
    before = _vectors._cache_size()
    for size in (1, 3, 32):
        np.testing.assert_allclose(model.embed(TEXTS, batch_size=size), want, atol=2e-6)
    texts = [" ".join(["a"] * n) for n in range(1, 30)]
    model.embed(texts, batch_size=4)
    assert _vectors._cache_size() - before <= 5
    told = []
    model.embed(texts, progress=told.append)
    assert sum(told) == 29
    assert model.embed([]).shape == (0, 32)


def test_texts_are_cut_at_the_greatest_length(tmp_path):
    model = flaxen.load(folder(tmp_path, flags("mean_tokens"), max_seq_length=3))
    np.testing.assert_array_equal(model.embed("a b c d"), model.embed("a b c"))


def test_a_model_has_room_for_no_more_than_its_positions(model):
    assert model.embed(" ".join(["a"] * 99)).shape == (32,)


def test_prompts(tmp_path):
    prompts = {"prompts": {"query": "d ", "document": ""}, "default_prompt_name": "query"}
    model = flaxen.load(folder(tmp_path, flags("mean_tokens"), prompts=prompts))
    plain = model.embed("d a", prompt="")
    np.testing.assert_array_equal(model.embed("a"), plain)
    np.testing.assert_array_equal(
        model.embed("a", prompt_name="document"), model.embed("a", prompt="")
    )
    with pytest.raises(InputError, match="Did you mean 'query'"):
        model.embed("a", prompt_name="querry")
    with pytest.raises(InputError, match="Both"):
        model.embed("a", prompt_name="query", prompt="b ")


def test_without_modules_it_is_the_mean(tmp_path):
    folder(tmp_path, flags("cls_token"))
    (tmp_path / "modules.json").unlink()
    model = flaxen.load(tmp_path)
    np.testing.assert_allclose(model.embed("a b"), states(model, "a b").mean(0), atol=2e-5)


@pytest.mark.parametrize(
    ("pooling", "more", "says"),
    [
        (flags(), [], "Pooling by"),
        ({"pooling_mode_strange": True, **flags("mean_tokens")}, [], "pooling_mode_strange"),
        ({"pooling_mode": "average"}, [], "average"),
        ({"pooling_mode": 3}, [], "Pooling by .3."),
        ({"pooling_mode": [{}]}, [], "Pooling by"),
        (flags("mean_tokens"), [("LSTM", {}, None)], "LSTM"),
        (flags("mean_tokens"), [("Dense", {"activation_function": "torch.Wave"}, None)], "Wave"),
    ],
)
def test_what_is_not_known_is_refused(pooling, more, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        recipe_of(folder(tmp_path, pooling, *more))


def test_other_refusals(model, tmp_path):
    with pytest.raises(InputError, match="hold a int"):
        model.embed(["a", 3])
    with pytest.raises(ConfigError, match="batch_size"):
        model.embed(["a"], batch_size=0)
    with pytest.raises(InputError, match="pass tok="):
        flaxen.pretrained.from_config(CASE.config).embed("a")
    about = flags("mean_tokens") | {"include_prompt": False}
    with pytest.raises(ConfigError, match="include_prompt"):
        flaxen.load(folder(tmp_path, about)).embed("a", prompt="d ")
    (tmp_path / "modules.json").write_text('[{"path": "../.."}]')
    recipe_of.cache_clear()
    with pytest.raises(CheckpointError, match=r"\.\."):
        recipe_of(tmp_path)


ONES = {name: np.ones(shape, np.float32) for name, shape in {"w": (3, 32), "b": (3,)}.items()}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"linear.weight": ONES["w"]}, r"holds \['linear.weight'\]; expected .*'linear.bias'"),
        ({"linear.weight": ONES["w"], "linear.bias": ONES["b"][:2]}, r"\(2,\).*expected \(outputs"),
        ({"linear.weight": ONES["b"], "linear.bias": ONES["b"]}, r"expected \(outputs, inputs\)"),
        ({"linear.weight": ONES["w"], "linear.bias": ONES["b"], "x": ONES["b"]}, "'x'.; expected"),
    ],
)
def test_a_dense_layer_of_other_tensors_is_refused(tensors, says, tmp_path):
    with pytest.raises(CheckpointError, match=says):
        recipe_of(folder(tmp_path, flags("mean_tokens"), ("Dense", {}, tensors)))


def test_a_dense_layer_of_another_width_is_refused(tmp_path):
    tensors = {"linear.weight": ONES["w"][:, :31], "linear.bias": ONES["b"]}
    path = folder(tmp_path, flags("mean_tokens"), ("Dense", {}, tensors))
    with pytest.raises(ConfigError, match="takes vectors of 31 numbers; those before it have 32"):
        flaxen.load(path).embed("a")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_seq_length": 0}, "max_seq_length of sentence_bert_config.json is 0"),
        ({"max_seq_length": -1}, "is -1; expected a whole number of at least 1"),
        ({"max_seq_length": "long"}, "is 'long'"),
        ({"do_lower_case": "no"}, "do_lower_case of sentence_bert_config.json is 'no'"),
        ({"prompts": {"prompts": {"query": 3}}}, "prompt 'query' is 3; expected str"),
        ({"prompts": {"prompts": ["query"]}}, "prompts is .*; expected dict"),
        ({"prompts": {"default_prompt_name": 3}}, "default_prompt_name is 3; expected str or None"),
    ],
)
def test_limits_and_prompts_of_another_kind_are_refused(limits, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        recipe_of(folder(tmp_path, flags("mean_tokens"), **limits))


def test_texts_that_are_none_are_refused(model):
    with pytest.raises(InputError, match="texts are None; expected a string"):
        model.embed(None)
    with pytest.raises(InputError, match=r"'\\ud800' at character 2, which is half of one"):
        model.embed("a \ud800")


def test_a_model_without_a_greatest_length_takes_any(tmp_path):
    config = {"model_type": "mamba", "vocab_size": 41, "hidden_size": 8, "num_hidden_layers": 1}
    flaxen.pretrained.from_config(config).save(tmp_path, tokenizer=word_tokenizer(41))
    model = flaxen.load(tmp_path)
    short, long = model.embed(["a b", "a b c d " * 5])
    np.testing.assert_allclose(short, model.embed("a b"), atol=2e-6)
    assert np.abs(long - short).max() > 1e-3


def test_what_reads_no_text_says_so(tmp_path):
    golden.write_folder(golden.case("vit"), tmp_path)
    with pytest.raises(InputError, match="it reads pixel_values, and no text"):
        flaxen.load(tmp_path).embed("a", tok=word_tokenizer(41))


def test_a_decoder_gives_vectors_too(tmp_path):
    config = {"model_type": "llama", "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
    flaxen.pretrained.from_config(config).save(tmp_path, tokenizer=word_tokenizer(41))
    model = flaxen.load(tmp_path)
    one, many = model.embed("a b c"), model.embed(["d", "a b c", "a b c d a"])
    np.testing.assert_allclose(many[1], one, atol=2e-6)


def test_the_command(tmp_path, capsys):
    path = folder(tmp_path / "m", flags("mean_tokens"), ("Normalize", None, None))
    assert main(["embed", str(path), "a b c", "a b", "d w20", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    vectors = np.array(written["vectors"])
    np.testing.assert_allclose(vectors @ vectors.T, written["cosines"], atol=1e-5)
    (tmp_path / "texts").write_text("a b c\n\nd w20\n")
    out = tmp_path / "out.npy"
    assert main(["embed", str(path), "--input", str(tmp_path / "texts"), "--output", str(out)]) == 0
    said = capsys.readouterr()
    assert "How alike" in said.out and "2 vectors of 32" in said.err
    np.testing.assert_allclose(np.load(out), vectors[[0, 2]], atol=2e-6)
    assert main(["embed", str(path), "a", "--output", str(tmp_path / "x.txt")]) == 2
    assert ".npy" in capsys.readouterr().err


def test_texts_from_standard_input(tmp_path, capsys, monkeypatch):
    path = folder(tmp_path / "m", flags("mean_tokens"))
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c\n\nd\n"))
    assert main(["embed", str(path), "-", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["texts"] == ["a b c", "d"] and "left out: 1" in said.err
    assert main(["embed", str(path), "a b c"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "a vector is one line"
    with pytest.raises(SystemExit):
        main(["embed", str(path), "a", "--jsn"])


def test_numbers_of_a_list_stand_in_one_line_of_json(capsys):
    print_json({"a": [1, 2.5, -3e-9], "b": ["[\n1,\n2]"]})
    text = capsys.readouterr().out
    assert "[1, 2.5, -3e-09]" in text
    assert json.loads(text) == {"a": [1, 2.5, -3e-9], "b": ["[\n1,\n2]"]}


def test_rows_are_of_any_length_where_nothing_sets_a_limit():
    model = flaxen.pretrained.from_config(CASE.config)
    tok = word_tokenizer(41)
    tok.model_max_length = int(1e30)
    module = type("Free", (), {"longest": lambda self: None})()
    free = type("Model", (), {"config": None, "module": module})()
    assert _limit(free, tok, Recipe()) == NO_LIMIT
    assert _limit(model, tok, Recipe()) == model.module.longest()
