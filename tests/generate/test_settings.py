"""What wins over what, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from flaxen.core.errors import InputError
from flaxen.generate import generate, stream
from flaxen.generate.settings import resolve
from flaxen.layers.runtime import Runtime


def settings(columns=1, stored=None, config=None, **asked):
    model = tiny.script([0], **(stored or {}))
    model.config = SimpleNamespace(**(config or {}))
    return resolve(model, columns, asked)


def test_nothing_said_is_twenty_greedy_tokens():
    s = settings()
    assert (s.max_new_tokens, s.do_sample, s.eos_token_id) == (20, False, ())


def test_max_new_tokens_wins_over_the_max_length_of_the_config():
    assert settings(30, stored={"max_length": 20}, max_new_tokens=5).max_new_tokens == 5
    assert settings(30, config={"max_length": 25}, max_new_tokens=5).max_new_tokens == 5


def test_max_length_counts_the_prompt():
    assert settings(30, max_length=37).max_new_tokens == 7
    assert settings(30, stored={"max_length": 64}).max_new_tokens == 34


def test_max_length_without_room_for_a_token_is_refused():
    with pytest.raises(
        InputError, match=r"max_length is 30 and the prompt has 30 .*max_new_tokens"
    ):
        settings(30, max_length=30)


def test_the_default_length_that_files_carry_is_nobodys_wish():
    assert settings(30, stored={"max_length": 20}).max_new_tokens == 20


@pytest.mark.parametrize(
    "asked, sampled",
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"do_sample": True}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0, "do_sample": True}, False),
        ({"do_sample": False, "top_p": 0.9}, False),
        ({"top_p": 1.0}, False),
    ],
)
def test_sampling_happens_only_when_it_is_asked_for(asked, sampled):
    assert settings(stored={"do_sample": True, "temperature": 0.6}, **asked).do_sample is sampled


def test_what_is_not_given_comes_from_the_generation_config():
    stored = {"temperature": 0.6, "top_k": 7, "eos_token_id": [3, 4], "repetition_penalty": 1.1}
    s = settings(stored=stored, do_sample=True, top_k=9)
    assert (s.temperature, s.top_k, s.eos_token_id, s.repetition_penalty) == (0.6, 9, (3, 4), 1.1)


def test_end_and_pad_ids_may_stand_in_the_config():
    s = settings(config={"eos_token_id": 3, "pad_token_id": None})
    assert (s.eos_token_id, s.pad_token_id) == ((3,), 3)
    assert settings(config={"eos_token_id": 3, "pad_token_id": 1}).pad_token_id == 1


def test_no_end_ids_can_be_asked_for():
    assert settings(config={"eos_token_id": 3}, eos_token_id=[]).eos_token_id == ()


def test_a_row_may_end_with_any_of_many_ids():
    eos = settings(eos_token_id=list(range(10))).traced(Runtime()).eos
    assert set(np.asarray(eos).tolist()) == {-1, *range(10)}


def test_strange_values_in_files_are_passed_over():
    s = settings(
        stored={"temperature": -1, "pad_token_id": -1, "eos_token_id": 999}, do_sample=True
    )
    assert (s.temperature, s.pad_token_id, s.eos_token_id) == (1.0, 0, ())


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2**31),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("max_new_tokens", "8"),
        ("max_length", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("min_new_tokens", -1),
        ("seed", -1),
        ("do_sample", 1),
        ("eos_token_id", 16),
        ("eos_token_id", [1, "a"]),
        ("pad_token_id", -1),
    ],
)
def test_an_error_names_the_argument_and_its_value(name, value):
    with pytest.raises(InputError) as error:
        settings(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}; expected")


def test_an_unknown_argument_offers_the_nearest():
    with pytest.raises(InputError, match="'max_tokens'.*Did you mean 'max_new_tokens'"):
        settings(max_tokens=3)


@pytest.mark.parametrize(
    "ids, mask, words",
    [
        ([], None, "empty"),
        ([[]], None, "empty"),
        ([1.5], None, "whole numbers"),
        ([[1, 2], [3]], None, "different lengths"),
        ([1, 16], None, r"input_ids\[0, 1\] is 16; expected 0 to 15"),
        ([1, -1], None, "is -1"),
        ([[[1]]], None, r"\(1, 1, 1\)"),
        ([1, 2], [1], r"\(1, 1\) and input_ids \(1, 2\)"),
        ([1, 2], [0, 0], "row 0"),
        ([1, 2], [1, 2], "besides 0"),
    ],
)
@pytest.mark.parametrize("run", [generate, stream])
def test_a_prompt_that_makes_no_sense_is_refused(run, ids, mask, words):
    with pytest.raises(InputError, match=words):
        run(tiny.script([0]), ids, mask)


def test_padding_may_hold_any_id():
    ids = generate(tiny.script([0, 3, 4]), [-100, 1], [0, 1], max_new_tokens=1)
    np.testing.assert_array_equal(ids, [[-100, 1, 0]])
