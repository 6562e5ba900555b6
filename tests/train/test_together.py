"""Two processes with four devices each train one model, are killed, go on, and stop together."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import golden
import numpy as np
import pytest
import trained_together
from stored_state import stored_state
from words import word_tokenizer

import flaxen
from flaxen.core.tree import paths
from flaxen.train.checkpoint import Checkpoints

SCRIPT = Path(trained_together.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What both left of a whole run, one that was killed and went on, and one that was stopped."""
    folder = tmp_path_factory.mktemp("together")
    golden.write_folder(golden.case("llama"), folder / "source")
    word_tokenizer(90).save_pretrained(folder / "source")
    texts = [" ".join(f"w{10 + (i * j) % 70}" for j in range(7)) for i in range(24)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "bad.jsonl").write_text(lines[0] + "nonsense\n")
    assert -signal.SIGKILL in both(folder, "begin")
    assert Checkpoints(folder / "killed" / "checkpoints", {}).steps() in ([4], [4, 8])
    assert both(folder, "go_on") == [2, 2]
    return folder


def both(folder: Path, stage: str) -> list[int]:
    """How two processes end; when one is killed, so is the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for i in range(2):
        command = [sys.executable, SCRIPT, str(port), str(i), folder, stage]
        with (folder / f"{stage}-{i}.err").open("wb") as said:
            started.append(subprocess.Popen(command, stderr=said))
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes


def losses(output: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def test_two_killed_processes_go_on_bit_by_bit(folder):
    want, got = losses(folder / "whole"), losses(folder / "killed")
    assert [step for step, *_ in want] == list(range(1, 11))
    assert got == want
    want, got = stored_state(folder / "whole", 10), stored_state(folder / "killed", 10)
    assert got.keys() == want.keys() and any("opt_state" in path for path in want)
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)


def test_both_export_what_they_trained(folder):
    trained = stored_state(folder / "whole", 10)
    for path, weight in paths(flaxen.load(folder / "whole" / "model").module).items():
        np.testing.assert_array_equal(weight, trained[f"trained.{path}"], err_msg=path)


def test_a_signal_to_one_stops_both_at_one_step(folder):
    assert [json.loads((folder / f"stopped-{i}.json").read_text()) for i in range(2)] == [0, 0]
    (step,) = Checkpoints(folder / "stopped" / "checkpoints", {}).steps()
    assert 2 <= step < 1000
    assert [number for number, *_ in losses(folder / "stopped")] == list(range(1, step + 1))
    assert not (folder / "stopped" / "model").exists()


def test_an_error_of_one_is_told_by_both_and_ends_both(folder):
    first, second = ((folder / f"go_on-{i}.err").read_text() for i in range(2))
    assert "Process 1 could not begin. InputError: The training data has bad lines" in first
    for said in (first, second):
        assert "bad.jsonl:2: not JSON" in said
    assert not (folder / "bad").exists()
