"""Commands that read headers only, on a real (tiny) checkpoint."""

from __future__ import annotations

import json

import golden
import pytest

from flaxen.cli import main


@pytest.fixture
def folder(tmp_path):
    return golden.write_folder(golden.case("qwen3"), tmp_path / "qwen3", shards=2)


def test_show(folder, capsys):
    assert main(["show", str(folder), "--mesh", "fsdp=2,tp=2", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    sizes = [array.size for array in golden.case("qwen3").weights.values()]
    assert written["parameters"] == sum(sizes)
    assert written["bytes_per_device"] < written["bytes"] / 3


def test_doctor(folder, capsys):
    assert main(["doctor", str(folder)]) == 0
    assert "fits" in capsys.readouterr().out


def test_doctor_on_a_config_key_that_nobody_reads(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    main(["doctor", str(folder), "--json"])
    assert "logit_scale" in json.loads(capsys.readouterr().out)["checkpoint"]["unread"]


def test_convert_dry_run_names_every_tensor_and_writes_nothing(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new"), "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    named = {name for row in rows for name in row["names"]}
    assert named == set(golden.case("qwen3").weights)
    assert not (tmp_path / "new").exists()


def test_convert(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
