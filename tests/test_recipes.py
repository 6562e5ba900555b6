"""Every recipe runs, with its own settings at the size of a toy."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest
from words import word_tokenizer

from flaxen.cli.train import run
from flaxen.train.run.prepare import check_objective
from flaxen.train.settings import read_yaml, run_config

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = {"steps": 2, "epochs": 1.0, "batch_size": 2, "accumulation": 1, "seq_len": 16, "warmup": 1}
LINES = {
    "dpo": {"prompt": "w5 w6", "chosen": "w7 w8", "rejected": "w9"},
    "grpo": {"prompt": "w5 w6"},
    "causal": {"text": "w5 w6 w7 w8 w9"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("model"))
    word_tokenizer(128).save_pretrained(target)
    return target


every_recipe = pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem
)


@every_recipe
def test_its_own_settings_go_together(path):
    check_objective(run_config(read_yaml(path)))


@every_recipe
def test_a_recipe_runs(path, folder, tmp_path):
    values = read_yaml(path)
    objective = values.get("objective", "causal")
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps(LINES[objective]) + "\n") * 16)
    values |= SMALL | {"model": str(folder), "data": str(data), "output": str(tmp_path / "run")}
    if "mesh" in values:
        values["batch_size"] = 8
    if objective == "grpo":
        values |= {"num_generations": 2, "max_completion_length": 4}
        values["reward"] = str(RECIPES / "rewards.py") + ":short_and_polite"
    result = run(run_config(values))
    assert result.finished and len(result.losses) == 2
    assert (result.model_path / "model.safetensors").exists()
    assert (result.adapter_path is not None) == ("lora_rank" in values)
