"""A starting file builds what the family it is like builds; lengths are of a family alone."""

from __future__ import annotations

import json

import golden
import pytest

from flaxen.cli import main
from flaxen.core.errors import InputError
from flaxen.families import FILES
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.family import Reading
from flaxen.show.family_source import length, lineage, starting_file

LIKE = ["llama", "qwen3_moe", "gpt2", "deepseek_v3", "qwen3_next", "bloom"]


@pytest.mark.parametrize("like", LIKE)
def test_a_starting_file_builds_what_its_model_does(like):
    text = starting_file("my-model", like)
    space: dict[str, object] = {}
    exec(compile(text, "my_model.py", "exec"), space)
    config = hf_config(golden.about(like)["config"])
    assert space["FAMILIES"]["my-model"].build(Reading(config)) == abstract_module(config)[0]
    assert space["my_model"] is space["FAMILIES"]["my-model"].build


@pytest.mark.parametrize("name", ["class", "decoder"])
def test_a_name_that_python_or_the_file_has_already_makes_no_harm(name):
    space: dict[str, object] = {}
    exec(compile(starting_file(name, "llama"), "new.py", "exec"), space)
    config = hf_config(golden.about("llama")["config"])
    assert space["FAMILIES"][name].build(Reading(config)) == abstract_module(config)[0]


def test_it_lists_the_keys_that_are_new():
    text = starting_file("gemma4_text", "gemma3_text")
    assert "# Keys of its config that gemma3_text's lacks" in text
    assert "no config class for 'my_model'" in starting_file("my_model", "llama")


@pytest.mark.parametrize(
    ("name", "like", "words"),
    [
        ("llama", "qwen3", "There is a family 'llama' already"),
        ("my model", "qwen3", "no model type"),
        ("mine", "quen3", "Did you mean 'qwen3'"),
    ],
)
def test_what_cannot_be_started_is_refused(name, like, words):
    with pytest.raises(InputError, match=words):
        starting_file(name, like)


@pytest.mark.parametrize("model_type", FILES)
def test_no_family_is_longer_than_a_hundred_lines(model_type):
    assert 0 < length(model_type) <= 100


def test_what_several_share_counts_once():
    source = lineage("qwen3")
    counted = [node for kind in source.families for node in source.own(kind)]
    assert len(counted) == len(set(counted))


def test_the_command_lists_and_starts(capsys):
    assert main(["families", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["model_type"] for row in rows} == set(FILES)
    assert main(["families", "new", "mine", "--like", "qwen3"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith('"""mine:') and "FILES" in said.err
    assert main(["families", "old"]) == 2
