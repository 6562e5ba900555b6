"""A whole run with another objective: from lines of a file to a folder of Transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from objective_runs import model, tok
from safetensors.numpy import load_file

import flaxen
from flaxen.core.errors import InputError
from flaxen.train import train

ABOUT = {"progress": False, "seq_len": 8, "batch_size": 2, "learning_rate": 0.02}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_labels_from_a_file_become_a_classifier(tmp_path):
    data = written(
        tmp_path / "a.jsonl", {"text": "a b", "label": 0}, {"text": "c d user", "label": 1}
    )
    start = model("llama", "ForSequenceClassification", 2)
    result = train(
        start,
        tok(),
        data,
        output=tmp_path / "run",
        eval_data=data,
        objective="classification",
        steps=20,
        lora_rank=2,
        **ABOUT,
    )
    rows = [row for row in result.rows if "eval_accuracy" in row]
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]
    assert "perplexity" not in rows[0]
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    head = np.asarray(start.module.score.weight)
    assert not np.array_equal(saved["score.weight"], head)
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    whole = adapter["base_model.model.score.weight"]
    np.testing.assert_array_equal(whole, saved["score.weight"])
    about = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (about["modules_to_save"], about["task_type"]) == (["score"], "SEQ_CLS")
    again = flaxen.load(tmp_path / "run" / "model")
    ids = np.array([[4, 5, 2, 2], [6, 7, 3, 2]])
    np.testing.assert_allclose(again(ids).logits, result.model(ids).logits, atol=1e-6)


def test_another_kind_of_line_is_told_before_anything_is_written(tmp_path):
    data = written(tmp_path / "a.jsonl", {"text": "a b"})
    with pytest.raises(InputError, match=r'"chosen" and "rejected"[\s\S]*a\.jsonl:1: found'):
        train(model(), tok(), data, output=tmp_path / "run", objective="dpo", **ABOUT)
    assert not (tmp_path / "run").exists()
