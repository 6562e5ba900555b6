"""Whoever is told of a run cannot end it, and is asked for before it begins."""

from __future__ import annotations

import warnings

import pytest
from tiny_decoder import tiny
from watched_runs import stand_in
from words import word_tokenizer

from flaxen.core.errors import ConfigError
from flaxen.train import TrainConfig, train
from flaxen.train.run.log import Log
from flaxen.train.run.sinks import SINKS, Sink, Told, check_sinks, open_sinks


class Offline(Sink):
    def __init__(self, told):
        self.tried = []

    def row(self, row):
        self.tried.append(row["step"])
        raise ConnectionError("no route to host")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setitem(SINKS._entries, "offline", Offline)


def told(folder, step=0):
    return Told(folder, "tests", "a run", {"steps": 3}, Log(folder / "log.jsonl", step), step)


def test_a_sink_that_fails_is_told_of_once_and_the_rest_goes_on(offline, tmp_path):
    about = told(tmp_path)
    with pytest.warns(RuntimeWarning, match="offline does not take .* no route to host") as said:  # noqa: SIM117
        with open_sinks(["offline"], about):
            for step in (1, 2, 3):
                about.log.write({"step": step, "loss": 1.0})
            assert about.log.listeners[-1].sink.tried == [1, 2, 3]
    assert len(said) == 1
    assert len(about.log.rows()) == 3
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "step,loss",
        "1,1.0",
        "2,1.0",
        "3,1.0",
    ]


def test_an_unknown_sink_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="'tensorbord'. Did you mean 'tensorboard'"):
        check_sinks(TrainConfig(output="x", report_to="tensorbord"))


def test_an_absent_package_is_told_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs trackio: pip install 'flaxen\[trackio\]'"):
        train(
            tiny(), word_tokenizer(90), "absent.jsonl", output=tmp_path / "o", report_to="trackio"
        )
    assert not (tmp_path / "o").exists()


def test_a_sink_that_cannot_be_begun_ends_the_run_before_its_first_step(monkeypatch, tmp_path):
    service = stand_in(monkeypatch, "wandb")

    def refuse(**given):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr("wandb.init", refuse)
    with (
        pytest.raises(ConfigError, match="wandb cannot be begun: RuntimeError: api_key"),
        open_sinks(["wandb"], told(tmp_path)),
    ):
        raise AssertionError("begun")
    assert service.told == {}


def test_a_service_that_is_told_later_hears_all_so_far(monkeypatch, tmp_path):
    service = stand_in(monkeypatch, "trackio")
    first = told(tmp_path)
    for step in (1, 2, 3):
        first.log.write({"step": step, "loss": 1.0})
    with open_sinks(["trackio"], told(tmp_path, step=2)):
        pass
    (heard,) = service.told.values()
    assert [step for step, _ in heard] == [1, 2]


def test_another_run_in_the_same_folder_has_another_name(monkeypatch, tmp_path):
    service = stand_in(monkeypatch, "trackio")
    for _ in range(2):
        with open_sinks(["trackio"], told(tmp_path)):
            pass
    assert len(service.told) == 2


def test_a_column_that_comes_later_is_in_the_whole_table(tmp_path):
    about = told(tmp_path)
    with open_sinks([], about):
        about.log.write({"step": 1, "loss": 1.0})
        about.log.write({"step": 1, "eval_loss": 2.0})
        now = (tmp_path / "log.csv").read_text().splitlines()
    assert now == ["step,loss,eval_loss", "1,1.0,", "1,,2.0"]


def test_what_a_service_prints_is_not_on_stdout(monkeypatch, tmp_path, capsys):
    service = stand_in(monkeypatch, "trackio")
    begin = service.init
    monkeypatch.setattr("trackio.init", lambda **given: print("* dashboard") or begin(**given))
    with warnings.catch_warnings(), open_sinks(["trackio"], told(tmp_path)):
        pass
    said = capsys.readouterr()
    assert said.out == "" and "dashboard" in said.err
