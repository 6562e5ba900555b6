"""Decoders that score rows: Transformers' numbers, heads that begin fresh, files."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.core.errors import CheckpointError, ConfigError, InputError

HF = json.loads((golden.DATA / "objectives.json").read_text())["classifier"]
TASK = "sequence-classification"
NAMES = ["no", "maybe", "yes"]


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """The golden llama's folder."""
    return golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def classifier(causal, tmp_path_factory):
    """The same with the head that Transformers was asked with."""
    folder = tmp_path_factory.mktemp("classifier")
    config = json.loads((causal / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(NAMES)},
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {k: v for k, v in golden.case("llama").weights.items() if "lm_head" not in k}
    save_file(weights | {"score.weight": np.float32(HF["head"])}, folder / "model.safetensors")
    return folder


def test_scores_and_loss_are_those_of_transformers(classifier):
    """Rows are padded on either side; the last token that is not padding decides."""
    model = flaxen.load(classifier)
    ids = np.array(HF["ids"])
    out = model(ids, attention_mask=ids != 0, labels=np.array(HF["labels"]))
    np.testing.assert_allclose(out.logits, HF["logits"], atol=5e-5)
    np.testing.assert_allclose(out.loss, HF["loss"], rtol=1e-5)


def test_it_is_saved_as_it_was(classifier, tmp_path):
    flaxen.load(classifier).save(tmp_path / "out")
    mine, given = (load_file(f / "model.safetensors") for f in (tmp_path / "out", classifier))
    assert mine.keys() == given.keys()
    for key, tensor in given.items():
        np.testing.assert_array_equal(mine[key], tensor)


def test_a_task_begins_with_a_fresh_head(causal, tmp_path):
    """Everything else is the checkpoint's, and the head of its task is left out."""
    about = {"task": TASK, "num_labels": NAMES, "config": {"pad_token_id": 0}}
    model = flaxen.load(causal, **about)
    assert model.loading.missing == ["score.weight"]
    assert model.module.labels() == 3
    assert model.config.id2label == dict(enumerate(NAMES))
    model.save(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    weights = golden.case("llama").weights
    assert saved.keys() == ({*weights} - {"lm_head.weight"}) | {"score.weight"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    again = flaxen.load(tmp_path / "out")
    ids = np.array(HF["ids"])
    np.testing.assert_array_equal(again(ids).logits, model(ids).logits)


def test_only_the_head_may_be_missing(causal, tmp_path):
    weights = dict(golden.case("llama").weights)
    del weights["model.norm.weight"]
    (tmp_path / "config.json").write_text((causal / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        flaxen.load(tmp_path, task=TASK)
    assert "model.norm.weight" in str(error.value)
    assert "score" not in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "falcon", "opt", "qwen3", "gemma2"])
def test_other_families_have_heads_too(name: str, tmp_path):
    folder = golden.write_folder(golden.case(name), tmp_path)
    model = flaxen.load(folder, task=TASK, num_labels=3)
    assert model.loading.missing == ["score.weight"]
    assert model.loading.unexpected == []
    assert model(np.array([[3, 4, 5]])).logits.shape == (1, 3)


def test_a_head_of_an_encoder_begins_fresh(tmp_path):
    """From masked language modeling; the pooler is the head's part."""
    import encoder_cases

    case = encoder_cases.case("bert/untied")
    folder = encoder_cases.write(tmp_path / "bert", case.config, case.weights)
    model = flaxen.load(folder, task=TASK, num_labels=4)
    assert set(model.loading.missing) >= {"classifier.weight", "classifier.bias"}
    assert model.module.labels() == 4


def test_what_cannot_be_asked_is_refused(causal, classifier):
    with pytest.raises(ConfigError, match="expected sequence-classification"):
        flaxen.load(causal, task="classification")
    with pytest.raises(ConfigError, match="num_labels is 0"):
        flaxen.load(causal, task=TASK, num_labels=0)
    with pytest.raises(InputError, match="cannot"):
        flaxen.load(classifier).generate(np.array([[1, 2]]), max_new_tokens=1)
