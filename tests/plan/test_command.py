"""`flaxen plan` from the command line: what it reads, says, and gives back."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from flaxen.cli import main

CONFIGS = Path(__file__).parent / "configs"
LLAMA_8B = str(CONFIGS / "llama-3-8b.json")
ON_V5P = ("--topology", "v5p:2x2x2", "--mesh", "fsdp=8", "--no-compile")


def planned(capsys, *arguments: str) -> tuple[int, dict]:
    status = main(["plan", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_folder_with_nothing_but_a_config_is_enough(tmp_path, capsys):
    shutil.copy(LLAMA_8B, tmp_path / "config.json")
    status, found = planned(capsys, str(tmp_path), *ON_V5P, "--remat", "block")
    assert status == 0 and found["fits"] is True
    # 8.03 billion masters and two moments of each, on 8 devices.
    (program,) = found["programs"]
    given = program["estimate"]["weights"] + program["estimate"]["optimizer"]
    assert given == pytest.approx(12 * 8.0303e9 / 8, rel=1e-3)


def test_the_estimate_is_what_the_tpu_compiler_says(capsys):
    # v5p:2x2x2, jax 0.10.2, libtpu 0.0.52: 11.221 GiB given and 7.033 GiB temporary.
    _, found = planned(capsys, LLAMA_8B, *ON_V5P, "--remat", "block")
    estimate = found["programs"][0]["estimate"]
    assert estimate["total"] - estimate["loaded"] == pytest.approx(18.254 * 2**30, rel=0.05)


def test_what_does_not_fit_ends_with_one_and_a_plan_that_does(capsys):
    status, found = planned(
        capsys, LLAMA_8B, "--topology", "v5e:2x4", "--mesh", "fsdp=8", "--no-compile"
    )
    assert status == 1 and found["fits"] is False
    assert found["needed"] > found["memory"]
    nearest = found["suggestions"][0]
    assert nearest["needed"] <= found["memory"]
    options = " ".join(nearest["words"]).split()
    again, other = planned(
        capsys, LLAMA_8B, "--topology", "v5e:2x4", "--mesh", "fsdp=8", "--no-compile", *options
    )
    assert again == 0 and other["needed"] == nearest["needed"]


def test_it_is_told_in_words_too(capsys):
    assert main(["plan", LLAMA_8B, *ON_V5P, "--hbm", "16"]) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said and "of 16.0 GiB" in said
    assert "  fits: --" in said and "MFU at most" in said


def test_inference_is_told_in_times_that_are_none_of_zero(capsys):
    assert main(["plan", LLAMA_8B, *ON_V5P, "--batch", "8", "--seq", "64", "--train", "none"]) == 0
    said = capsys.readouterr().out
    assert "FLOP for all prompts; " in said and "FLOP for one token of each row; " in said
    assert " ms at best" in said and "0.000" not in said
    # A decoding step is bound by memory: how much of the arithmetic it uses says nothing.
    assert said.count("MFU at most") == 1 and "MFU at most 0" not in said


def test_virtual_devices_are_compiled_for(capsys, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ("--mesh", "tp=4", "--batch", "1", "--seq", "8", "--train", "none")
    status, found = planned(capsys, str(tmp_path), "--devices", "4", *sizes, "--hbm", "1")
    assert status == 0
    prefill, decode = found["programs"]
    assert decode["needed"] == decode["compiled"]["peak"]
    # One sum after attention and one after the feed-forward network, of one token's channels.
    sums = [c for c in decode["collectives"] if c["kind"] == "all-reduce" and c["nbytes"] >= 192]
    assert sums and all(c["axes"] == ["tp"] for c in sums)
    assert sum(c["count"] for c in sums) >= 2
    assert prefill["tokens"] == 8 and decode["tokens"] == 1


def test_without_the_tpu_compiler_it_says_what_is_missing(monkeypatch, capsys):
    found = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "libtpu" else found(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    _, said = planned(capsys, LLAMA_8B, *ON_V5P[:-1], "--remat", "block")
    assert "flaxen[tpu-plan]" in said["notes"][0]
    assert "compiled" not in said["programs"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.json"], "There is no file no/such.json"),
        ([LLAMA_8B, "--topology", "v5p:2x2x2", "--devices", "8"], "give one of them"),
        ([LLAMA_8B, "--topology", "v5p:2x2x2", "--mesh", "fsdp=3"], "3 devices"),
        ([LLAMA_8B, "--topology", "v5p:2x2x2", "--train", "some"], "train is 'some'"),
        ([LLAMA_8B, "--topology", "v5p:2x2x2", "--hbm", "nan"], "--hbm is nan; expected GiB above"),
        ([LLAMA_8B, "--topology", "v5p:2x2x2", "--remat", "bloc"], "Did you mean 'block'"),
    ],
)
def test_what_cannot_be_planned_is_an_error_of_its_own(arguments, message, capsys):
    assert main(["plan", *arguments, "--no-compile"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_rows_longer_than_the_positions_of_a_model_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 12}')
    assert main(["plan", str(tmp_path), *ON_V5P]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has 4096 tokens, but this model has positions for 1024; say --seq" in said


def test_a_folder_without_a_config_is_refused(tmp_path, capsys):
    assert main(["plan", str(tmp_path), *ON_V5P]) == 2
    assert "config.json" in capsys.readouterr().err
