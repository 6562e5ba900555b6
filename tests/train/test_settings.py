"""A run is described by one file or by flags, and every mistake in it is named."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from flaxen.cli import main
from flaxen.core.errors import ConfigError
from flaxen.train.settings import RunConfig, TrainConfig, as_yaml, read_yaml, run_config

LEAST = {"model": "m", "data": "d.jsonl"}


def test_a_printed_run_reads_back_as_itself(tmp_path):
    run = run_config(
        LEAST
        | {"steps": 3, "lora_rank": 2, "lora_targets": ["q_proj"], "beta2": 0.95, "clip": None}
    )
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(run))
    assert run_config(read_yaml(path)) == run


def test_a_file_has_every_setting_once_and_says_what_it_is():
    text = as_yaml(run_config(LEAST))
    assert list(yaml.safe_load(text)) == [
        line.split(":")[0] for line in text.splitlines() if line and not line.startswith("#")
    ]
    assert set(yaml.safe_load(text)) == {field.name for field in dataclasses.fields(RunConfig)}
    assert all(field.metadata["about"].endswith(".") for field in dataclasses.fields(RunConfig))


def test_every_unknown_key_is_named_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        run_config(LEAST | {"learning_rte": 1, "warm_up": 3})
    text = str(error.value)
    assert "unknown key 'learning_rte'. Did you mean 'learning_rate'?" in text
    assert "unknown key 'warm_up'. Did you mean 'warmup'?" in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", "many", "a whole number"),
        ("steps", 2.5, "a whole number"),
        ("learning_rate", [1], "a number"),
        ("packing", "yes please", "true or false"),
        ("packing", 1, "true or false"),
        ("objective", 3, "text"),
        ("data", {"a": 1}, "text or a list"),
    ],
)
def test_a_value_of_another_kind_is_named(key, value, expected):
    with pytest.raises(ConfigError, match=f"{key} is .*, expected {expected}"):
        run_config(LEAST | {key: value})


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_numbers_that_yaml_takes_for_text_are_numbers(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\ndata: d\nlearning_rate: {text}\n")
    assert run_config(read_yaml(path)).learning_rate == 1e-4


def test_what_lacks_is_named():
    with pytest.raises(ConfigError, match="model and data must be given"):
        run_config({"steps": 3})


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read_yaml(path)


def test_ranges_are_checked_all_at_once():
    with pytest.raises(ConfigError) as error:
        TrainConfig(output="x", batch_size=0, clip=-1.0, beta1=2.0, dtype="float64")
    for wrong in (
        "batch_size is 0, expected at least 1",
        "clip is -1.0, expected more than 0",
        "beta1 is 2.0, expected less than 1",
        "dtype is 'float64', expected float32, bfloat16 or float16",
    ):
        assert wrong in str(error.value)


def test_flags_win_over_a_file(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: d.jsonl\nsteps: 3\nbatch_size: 2\n")
    assert main(["train", "--config", str(path), "--steps", "7", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["steps"], printed["batch_size"], printed["lora_rank"]) == (7, 2, None)


def test_without_a_file_adapters_are_trained(capsys):
    assert main(["train", "m", "a.jsonl", "b.jsonl", "--print-config", "--no-packing"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["lora_rank"], printed["lora_alpha"]) == (8, 16.0)
    assert (printed["data"], printed["packing"]) == (["a.jsonl", "b.jsonl"], False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", float("inf")),
        ("epochs", float("inf")),
        ("eps", float("inf")),
        ("beta1", 1),
        ("beta2", 1.0),
        ("seed", -1),
        ("seed", 2**63),
        ("steps", 2**31),
        ("warmup", 10**30),
        ("reward_weights", [1.0, float("nan")]),
        ("alpha_pattern", {"q_proj": float("nan")}),
    ],
)
def test_a_number_that_no_device_can_follow_is_refused(key, value):
    more = {"lora_rank": 2} if key == "alpha_pattern" else {}
    with pytest.raises(ConfigError, match=f"{key} is .*, expected"):
        run_config(LEAST | more | {key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layers_to_transform", ["a"], "of each entry a whole number, not 'a'"),
        ("rank_pattern", {"q_proj": "x"}, "of each entry a whole number, not 'x'"),
        ("lora_targets", [1], "of each entry text, not 1"),
        ("reward", [1], "of each entry text, not 1"),
        ("sample_prompts", [{"a": 1}], "of each entry text, not"),
        ("columns", {"text": 1}, "of each entry text, not 1"),
        ("columns", {1: "text"}, "of each key text, not 1"),
        ("data", [["a"]], "of each entry text or a mapping, not"),
    ],
)
def test_what_a_list_or_mapping_holds_is_looked_at_too(key, value, expected):
    with pytest.raises(ConfigError, match=f"{key} is .*, expected {expected}"):
        run_config(LEAST | {key: value})


@pytest.mark.parametrize(
    "asked", [{"lora_alpha": 32}, {"lora_targets": "q_proj"}, {"use_dora": True}]
)
def test_settings_of_adapters_without_a_rank_do_not_train_all_weights(asked):
    with pytest.raises(ConfigError, match=f"{next(iter(asked))} .*; say lora_rank"):
        run_config(LEAST | asked)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nsteps: 2\nseed: 3\n", "'seed' twice, in lines 1 and 3"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("data: 2020-99-99\n", "no YAML"),
    ],
)
def test_a_file_that_is_not_clear_is_refused(text, expected, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_yaml(path)
