"""A model that lacks a token, a place or a target that a run asks of it: told at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from objective_runs import VOCAB, model, tok
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.core.errors import ConfigError, InputError
from flaxen.train import train
from flaxen.train.run.vocabulary import check_ids, check_length

QUICK = {"steps": 1, "batch_size": 2, "seq_len": 8, "progress": False}


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "more"),
    [
        ({"text": "a w40 b"}, {}),
        ({"text": "a w40 b"}, {"streaming": True}),
        ({"prompt": "a", "chosen": "w40", "rejected": "b"}, {"objective": "dpo"}),
        ({"prompt": "a w40"}, {"objective": "grpo", "max_completion_length": 2, "batch_size": 8}),
    ],
)
def test_a_token_beyond_the_vocabulary_is_told(record, more, tmp_path):
    given = QUICK | {"output": tmp_path / "run"} | more
    if more.get("objective") == "grpo":
        given["reward"] = lambda prompts: [0.0] * len(prompts)
    with pytest.raises(InputError, match=f"the token id 40, but the model has {VOCAB} tokens"):
        train(model(), word_tokenizer(50), written(tmp_path / "a.jsonl", record), **given)


def test_a_tokenizer_may_know_more_than_the_data_uses(tmp_path):
    data = written(tmp_path / "a.jsonl", {"text": "a b c"})
    given = QUICK | {"output": tmp_path / "run", "lora_rank": 2, "lora_targets": ["q_proj"]}
    assert train(model(), word_tokenizer(50), data, **given).finished


def test_only_ids_are_looked_at():
    batch = {"ids": np.array([[1, 5]]), "positions": np.array([[0, 90]])}
    check_ids(batch, 6)
    with pytest.raises(InputError, match="the token id 5, but the model has 5 tokens"):
        check_ids(batch, 5)
    with pytest.raises(InputError, match="the token id 9"):
        check_ids({"chosen_ids": np.array([[9]])}, 6)


def test_rows_beyond_the_positions_are_told(tmp_path):
    bert = model("bert", "ForSequenceClassification", 2)
    data = written(tmp_path / "a.jsonl", {"text": "a b c", "label": 0})
    given = QUICK | {"objective": "classification", "output": tmp_path / "run"}
    with pytest.raises(InputError, match="seq_len is 17, .* positions for 16 tokens; say seq_len"):
        train(bert, tok(), data, **given | {"seq_len": 17})
    check_length(bert.module, 16)


def test_adapters_that_would_stand_nowhere_are_refused(tmp_path):
    data = written(tmp_path / "a.jsonl", {"text": "a b c"})
    given = QUICK | {"output": tmp_path / "run", "lora_rank": 2}
    for more, said in (
        ({"layers_to_transform": [5]}, "names layer 5, where no projection would get an adapter"),
        ({"lora_targets": []}, "No projection gets an adapter"),
        ({"lora_targets": ["dense"]}, "'dense' matches no projection"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(tiny(), tok(), data, **given | more)
    assert not (tmp_path / "run").exists()
