"""`flaxen quantize` on a tiny model."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from words import word_tokenizer

import flaxen
from flaxen.cli import main
from flaxen.cli.quantize import perplexity
from flaxen.core.errors import InputError

TEXT = " ".join(f"w{10 + i * i % 23}" for i in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("llama"))
    word_tokenizer(90).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def run(folder, *options):
    text = ("--text", str(folder / "text.txt"), "--length", "16")
    return main(["quantize", str(folder), *map(str, options), *text])


def test_it_measures_what_it_writes(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "small", "--bits", 4, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["before"]["perplexity"] != found["after"]["perplexity"]
    assert found["after"]["bytes"] < found["before"]["bytes"] / 2
    assert {row["kind"] for row in found["kinds"]} >= {"self_attn.q_proj", "mlp.down_proj"}
    assert all(0.05 < row["relative_error"] < 0.2 for row in found["kinds"])
    again = flaxen.load(tmp_path / "small")
    ids = np.asarray(flaxen.tokenizer(folder)(TEXT, add_special_tokens=False)["input_ids"])
    assert perplexity(again, ids, 16) == pytest.approx(found["after"]["perplexity"], rel=1e-4)
    assert run(folder, tmp_path / "small", "--bits", 4) == 2
    assert "add --overwrite" in capsys.readouterr().err


def test_rules_and_a_table(folder, capsys):
    assert run(folder, "--rules", "mlp=8", "--rules", "embed_tokens=none") == 0
    printed = capsys.readouterr().out
    assert "mlp.up_proj" in printed and "perplexity of 40 tokens" in printed
    assert "q_proj" not in printed
    assert run(folder, "--rules", "mlp=5") == 2
    assert "write for example" in capsys.readouterr().err


def test_a_gguf_file_has_eight_bits(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "a.gguf", "--bits", 4) == 2
    assert "8 bits throughout" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "b"), "--quantize", "gptq"]) == 2
    assert "flaxen quantize" in capsys.readouterr().err


def test_a_perplexity_is_exp_of_the_mean_loss(folder):
    model = flaxen.load(folder)
    ids = np.asarray(golden.case("llama").arrays["full_input_ids"])[0]
    logits = np.asarray(model(ids[None]).logits, np.float64)[0, :-1]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.exp(-logp[np.arange(len(ids) - 1), ids[1:]].mean())
    assert perplexity(model, ids, len(ids)) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InputError, match="two tokens or more; the text has 1"):
        perplexity(model, ids[:1], 16)
