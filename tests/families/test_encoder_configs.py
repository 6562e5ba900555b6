"""What encoders say of configs that they do not follow, and of files with other heads or names."""

from __future__ import annotations

import re

import encoder_cases
import numpy as np
import pytest

import flaxen
from flaxen import CheckpointError, ConfigError
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.families.config import abstract_module, hf_config

BERT = encoder_cases.case("bert/bare")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("bert/bare", {"is_decoder": True}, "is_decoder"),
        ("bert/bare", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert/bare", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert/bare", {"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel"),
        ("bert/bare", {"hidden_act": "geluu"}, "geluu"),
        ("bert/bare", {"num_attention_heads": 5}, "num_attention_heads=5"),
        ("bert/span", {"num_labels": 3}, "2 labels"),
        ("bert/single", {"problem_type": "ranking"}, "ranking"),
        ("mpnet/bare", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
        ("modernbert/bare", {"sparse_prediction": True}, "sparse_prediction"),
        ("nomic_bert/bare", {"rotary_emb_base": 500}, "rotary_emb_base=500"),
        ("nomic_bert/bare", {"prenorm": True}, "prenorm"),
        ("nomic_bert/bare", {"architectures": ["NomicBertForQuestionAnswering"]}, "Nomic"),
    ],
)
def test_a_config_that_is_not_followed_is_refused(name, change, says):
    config = encoder_cases.case(name).config | change
    with pytest.raises(ConfigError, match=says):
        abstract_module(hf_config(config))


def test_a_window_that_no_layer_has_and_labels_of_another_loss_change_nothing():
    config = encoder_cases.case("modernbert/bare").config | {"layer_types": ["full_attention"] * 4}
    more = {"local_attention": 6, "sparse_pred_ignore_index": -1}
    plain, other = (abstract_module(hf_config(config | x))[0] for x in ({}, more))
    assert plain == other


@pytest.mark.parametrize("name", encoder_cases.names())
def test_keys_of_other_heads_change_nothing(name):
    config = encoder_cases.case(name).config
    own = {"distilbert": ["seq_classif_dropout", "qa_dropout"], "mpnet": []}
    for key in own.get(config["model_type"], ["classifier_dropout"]):
        abstract_module(hf_config(config | {key: 0.3}))


def test_a_head_that_the_file_lacks_is_missing(tmp_path):
    folder = encoder_cases.write(tmp_path, BERT.config, BERT.weights)
    asked = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    with pytest.raises(CheckpointError, match=r"missing +classifier\.weight"):
        flaxen.load(folder, config=asked)
    model = flaxen.load(folder, config=asked, strict=False)
    assert sorted(model.loading.missing) == ["classifier.bias", "classifier.weight"]
    assert model(**BERT.given).logits.shape == (3, 3)
    model.save(tmp_path / "tuned")
    again = flaxen.load(tmp_path / "tuned")
    np.testing.assert_array_equal(again(**BERT.given).logits, model(**BERT.given).logits)


def test_heads_that_the_model_does_not_have_are_left_out(tmp_path):
    case = encoder_cases.case("bert/pretraining")
    config = case.config | {"architectures": ["BertForMaskedLM"]}
    model = flaxen.load(encoder_cases.write(tmp_path, config, case.weights))
    left = ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]
    left += ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    assert sorted(model.loading.left_out) == left
    given = {k: v for k, v in case.given.items() if "label" not in k}
    want, mask = case.want["prediction_logits"], given["attention_mask"]
    assert np.abs(model(**given).logits - want)[mask == 1].max() < 5e-5
    odd = case.weights | {"bert.strange.weight": np.zeros(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"unexpected +bert\.strange"):
        flaxen.load(encoder_cases.write(tmp_path / "odd", config, odd))


def renamed(weights, *pairs):
    for old, new in pairs:
        weights = {re.sub(old, new, key): x for key, x in weights.items()}
    return weights


@pytest.mark.parametrize(
    "pairs",
    [
        [("^", "bert.")],
        [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")],
    ],
    ids=["prefixed", "gamma-beta"],
)
def test_older_names_mean_the_same_and_come_back(pairs, tmp_path):
    weights = renamed(BERT.weights, *pairs)
    ids = {"embeddings.position_ids": np.arange(40)[None]}
    model = flaxen.load(encoder_cases.write(tmp_path, BERT.config, weights | ids))
    mask = BERT.given["attention_mask"]
    error = np.abs(model(**BERT.given).last_hidden_state - BERT.want["last_hidden_state"])
    assert error[mask == 1].max() < 5e-5
    model.save(tmp_path / "back")
    assert set(open_checkpoint(tmp_path / "back")) == set(weights)


def test_nomic_files_of_today_mean_the_same(tmp_path):
    case = encoder_cases.case("nomic_bert/bare")
    new = renamed(
        case.weights,
        (r"encoder\.layers", "layers"),
        ("emb_ln", "embeddings.LayerNorm"),
        (r"attn\.out_proj", "self_attn.o_proj"),
        ("fc11", "up_proj"),
        ("fc12", "gate_proj"),
        ("fc2", "down_proj"),
        ("norm1", "post_attention_layernorm"),
        ("norm2", "post_mlp_layernorm"),
    )
    for key in [key for key in new if "Wqkv" in key]:
        for part, x in zip("qkv", np.split(new.pop(key), 3), strict=True):
            new[key.replace("attn.Wqkv", f"self_attn.{part}_proj")] = x
    model = flaxen.load(encoder_cases.write(tmp_path, case.config, new))
    mask = case.given["attention_mask"]
    error = np.abs(model(**case.given).last_hidden_state - case.want["last_hidden_state"])
    assert error[mask == 1].max() < 5e-5
    model.save(tmp_path / "back")
    assert set(open_checkpoint(tmp_path / "back")) == set(new)
