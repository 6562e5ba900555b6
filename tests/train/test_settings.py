"""A run is described by one file or by flags, and every mistake in it is named."""

from __future__ import annotations

import dataclasses
import io

import pytest
import yaml

from flaxen.cli import main
from flaxen.core.errors import ConfigError
from flaxen.layers.checkpointing import POLICIES
from flaxen.train import OBJECTIVES, OPTIMIZERS, SCHEDULES
from flaxen.train.objectives.advantages import SCALES
from flaxen.train.objectives.dpo import LOSSES
from flaxen.train.settings import RunConfig, TrainConfig, as_yaml, read_yaml, run_config
from flaxen.train.settings.unread import OF_OBJECTIVES

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


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("objective", "casual", "causal"),
        ("optimizer", "adam", "adamw"),
        ("schedule", "cosin", "cosine"),
        ("remat", "dot", "dots"),
        ("overlong", "cutt", "cut"),
        ("bits", "nf8", "nf4"),
    ],
)
def test_a_choice_that_is_none_is_told_with_all_and_the_nearest(key, value, nearest):
    with pytest.raises(ConfigError, match=rf"{key} is .*, expected .*{nearest}.*\. Did you mean"):
        run_config(LEAST | {"lora_rank": 2, key: value})


def test_every_choice_stands_in_the_help_and_in_a_file(capsys):
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    text = as_yaml(run_config(LEAST))
    for names in (OBJECTIVES, OPTIMIZERS, SCHEDULES, POLICIES, ["8, 4, nf4"]):
        listed = f"{', '.join(names)}."
        assert listed in shown and listed in text
    losses = next(line for line in text.splitlines() if line.startswith("loss_type"))
    assert all(name in losses for name in (*LOSSES, *SCALES))


@pytest.mark.parametrize("text", ["4", '"4"', "'4'"])
def test_bits_are_a_number_or_its_text(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\ndata: d\nlora_rank: 2\nbits: {text}\n")
    assert run_config(read_yaml(path)).bits == 4


def test_choices_of_flags_are_those_of_a_file(capsys):
    flags = ["--bits", "8", "--remat", "true", "--objective", "grpo", "--scale-rewards", "false"]
    assert main(["train", "m", "d.jsonl", *flags, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["bits"], printed["remat"], printed["scale_rewards"]) == (8, True, False)


def test_every_setting_of_objectives_is_read_by_some_and_refused_by_others():
    """`reads` of an objective with none is what makes each of them refused."""
    read = {name for each in OBJECTIVES.values() for name in each.reads}
    assert read == OF_OBJECTIVES
    values = {bool: True, str: "all", int: 3, float: 0.25}
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    for name in OF_OBJECTIVES:
        kind = type(fields[name].default)
        given = {"overlong": "drop", "reward_weights": [1.0], "scale_rewards": "batch"}
        given |= {"importance_sampling_level": "sequence"}
        value = given.get(name, values.get(kind, "x" if name in ("reward", "reference") else 0.25))
        value = "ipo" if name == "loss_type" else value
        with pytest.raises(ConfigError, match=f"{name} is .* 'classification' does not read, only"):
            run_config(LEAST | {"objective": "classification", name: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.2}, "beta is 0.2, which the objective 'causal' does not read, only dpo, ipo"),
        ({"objective": "dpo", "reward_weights": [1.0]}, r"reward_weights is \[1.0\], .* only grpo"),
        ({"objective": "kto", "train_on": "all"}, "train_on is 'all'.* only causal, distillation"),
        ({"objective": "masked", "reward": "a.py:f"}, "reward is 'a.py:f'.* only grpo"),
        ({"reference": "m"}, "reference is 'm', .* only dpo"),
        ({"num_labels": 3}, "num_labels is 3, .* say task: sequence-classification"),
        ({"fresh": True, "task": "sequence-classification"}, "task is not read with fresh"),
        ({"bits": 8}, "bits is 8, .* say lora_rank"),
        ({"shuffle_buffer": 5}, "shuffle_buffer is of streams alone"),
    ],
)
def test_what_nothing_reads_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        run_config(LEAST | given)


def test_what_is_given_as_it_is_anyway_is_no_mistake():
    """A file that was printed says every setting."""
    printed = yaml.safe_load(as_yaml(run_config(LEAST)))
    assert run_config(printed | {"objective": "classification"}).objective == "classification"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rank_pattern", {"q_proj": 0}, "of each entry at least 1"),
        ("rank_pattern", {"q_proj": -2}, "of each entry at least 1"),
        ("alpha_pattern", {"q_proj": 0}, "of each entry more than 0"),
        ("layers_to_transform", [0, -1], "of each entry at least 0"),
        ("lora_rank", 0, "at least 1"),
        ("lora_alpha", 0, "more than 0"),
    ],
)
def test_numbers_of_adapters_are_checked(key, value, said):
    with pytest.raises(ConfigError, match=f"{key} is .*, expected {said}"):
        run_config(LEAST | {"lora_rank": 2} | {key: value})


def test_a_printed_run_can_be_piped_back(capsys, monkeypatch):
    assert main(["train", "m", "d.jsonl", "--lora-rank", "3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(printed))
    assert main(["train", "--config", "-", "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    monkeypatch.setattr("sys.stdin", io.StringIO("nonsense"))
    assert main(["train", "--config", "-"]) == 2
    assert "Standard input holds str" in capsys.readouterr().err
