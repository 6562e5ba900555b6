"""The model card beside what a run exports."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import yaml

from flaxen.train import TrainConfig
from flaxen.train.run.card import MARK, card, hub_id, write_card

CACHED = Path("/cache/models--org--Base-7B/snapshots/abc")

ROWS = [
    {"step": 0, "eval_loss": 3.0, "perplexity": 20.1, "eval_accuracy": 0.25},
    {"step": 1, "loss": 3.5, "tokens": 100, "seconds": 1.0, "memory_bytes": 2**30},
    {"step": 2, "loss": 2.5, "tokens": 100, "seconds": 2.0, "memory_bytes": 2**31},
    {"step": 2, "eval_loss": 2.0, "perplexity": 7.4, "eval_accuracy": 0.5},
]


def run_of(folder: Path | None = CACHED, classes: tuple[str, ...] = ("LlamaForCausalLM",), **more):
    """As much of a run as a card asks for."""
    space = types.SimpleNamespace
    config = TrainConfig(output="runs/mine", **more)
    model = space(
        origin=space(folder=folder),
        config=space(architectures=list(classes), model_type="llama"),
        module=None,
    )
    source = space(per_epoch=7, fingerprint=lambda: "feed", count=1234)
    runtime = space(placement=None)
    return space(model=model, config=config, source=source, runtime=runtime, steps=2)


def told(run, adapter=False, data="learned.jsonl"):
    return card(Path("/runs/mine/model"), run, data, ROWS, adapter=adapter, picture=False)


def front(text: str):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_hub_learns_the_base_the_library_and_the_task():
    assert front(told(run_of())) == {
        "base_model": "org/Base-7B",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flaxen", "jax", "causal"],
    }
    of_adapter = front(told(run_of(lora_rank=4), adapter=True))
    assert (of_adapter["library_name"], of_adapter["base_model_relation"]) == ("peft", "adapter")
    assert of_adapter["tags"] == ["flaxen", "jax", "causal", "lora"]


def test_a_folder_that_is_not_of_the_hub_is_no_base_there():
    text = told(run_of(Path("/home/me/secret place/mine")))
    assert "base_model" not in front(text)
    assert "`mine`" in text and "secret place" not in text


def test_an_adapter_names_the_folder_of_its_base():
    text = told(run_of(Path("/home/me/secret place/mine")), adapter=True)
    assert 'AutoModelForCausalLM.from_pretrained("mine")' in text and "secret place" not in text
    assert '.from_pretrained("org/Base-7B")' in told(run_of(), adapter=True)


def test_an_adapter_of_a_base_without_a_folder_is_not_said_to_load_without_it():
    text = told(run_of(None), adapter=True)
    assert 'base.load_adapter("model")' in text
    assert "flaxen.load(" not in text and "from_pretrained" not in text


def test_an_adapter_of_a_classifier_loads_a_classifier():
    text = told(run_of(classes=("LlamaForSequenceClassification",)), adapter=True)
    assert "AutoModelForSequenceClassification.from_pretrained" in text


def test_rewards_are_results():
    rows = [ROWS[1] | {"reward": 0.25}, {"step": 2, "eval_reward": 0.5}, ROWS[2] | {"reward": 0.75}]
    text = card(Path("/runs/m/model"), run_of(), "a", rows, adapter=False, picture=False)
    assert "| training reward | 0.25 → 0.75 |" in text and "| eval reward | 0.5 → 0.5 |" in text


@pytest.mark.parametrize(
    ("name", "task", "auto"),
    [
        ("BertForMaskedLM", "fill-mask", "AutoModelForMaskedLM"),
        ("BertForSequenceClassification", "text-classification", "SequenceClassification"),
        ("CLIPModel", None, "AutoModel.from"),
    ],
)
def test_the_task_is_that_of_the_class(name, task, auto):
    text = told(run_of(classes=(name,)))
    assert front(text).get("pipeline_tag") == task and auto in text


def test_it_tells_results_data_settings_and_machine():
    text = told(run_of(learning_rate=2e-4, report_to="wandb"), data=["/x/a.jsonl", Path("b.txt")])
    for line in (
        "| training loss | 3.5 → 2.5 |",
        "| perplexity | 20.1 → 7.4 |",
        "| eval accuracy | 0.25 → 0.5 |",
        "| files | `a.jsonl`, `b.txt` |",
        "| examples | 1,234 |",
        "| hash of all tokens | `feed` |",
        "| `learning_rate` | `0.0002` |",
        "| devices | 1 x cpu |",
        "| targets | 200 |",
        "| time | 0:00:03 |",
        "| most memory | 2.0 GiB |",
    ):
        assert line in text
    assert "wandb" not in text and "weight_decay" not in text


def test_a_card_that_somebody_wrote_stays(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("My own words.\n")
    assert write_card(tmp_path, run_of(), "a.jsonl", ROWS, None, adapter=False) is None
    assert readme.read_text() == "My own words.\n"


def test_its_own_card_is_written_anew(tmp_path):
    for rank in (None, 8):
        write_card(tmp_path, run_of(lora_rank=rank), "a.jsonl", ROWS, None, adapter=False)
    text = (tmp_path / "README.md").read_text()
    assert text.count(MARK) == 1 and "| `lora_rank` | `8` |" in text


@pytest.mark.parametrize(
    ("folder", "name"),
    [(CACHED, "org/Base-7B"), (Path("/cache/models--gpt2/snapshots/1"), "gpt2"), (None, None)],
)
def test_a_folder_in_the_hubs_cache_tells_its_id(folder, name):
    assert hub_id(folder) == name
