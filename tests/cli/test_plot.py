"""`flaxen plot`."""

from __future__ import annotations

import json

import pytest

from flaxen.cli import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [{"step": i, "loss": 4.0 / i, "lr": 0.1} for i in (1, 2)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


def test_runs_become_a_page(runs, capsys):
    assert main(["plot", "a", "b"]) == 0
    said = capsys.readouterr()
    assert "a: step 2, loss 4 → 2, lr 0.1 → 0.1" in said.out and "curves.html" in said.err
    assert (runs / "curves.html").read_text().startswith("<!doctype html>")


def test_several_metrics_become_a_picture_and_json(runs, capsys):
    given = ["--metric", "loss", "lr", "--output", "out/c.png", "--log-y", "--json"]
    assert main(["plot", "a", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["runs"][0]["metrics"]) == ["loss", "lr"]
    assert (runs / told["output"]).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_the_metric_says_so(runs, capsys):
    (runs / "b" / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert main(["plot", "a", "b", "--metric", "reward"]) == 0
    assert "a: step 2, nothing of that" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", "--output", "c.gif"], "ends in .png or .html"),
        (["absent"], "absent is no run: it is not there"),
        (["."], "it has no log.jsonl"),
        (["a", "--metric", "los"], "Did you mean 'loss'?"),
        (["a", "--output", "a/log.jsonl/c.html"], "c.html cannot be written: File exists"),
        (["a", "--output", "a/log.jsonl/c.png"], "c.png cannot be written: File exists"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(given, said, runs, capsys):
    assert main(["plot", *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b"]
