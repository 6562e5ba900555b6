"""Two processes with four devices each share a model, on loopback."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import golden
import numpy as np
import pytest
from two_processes import PROMPTS, one_step

import flaxen
from flaxen.core.tree import paths

SCRIPT = Path(__file__).parent.parent / "two_processes.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that was loaded, the one that both wrote, and what each reports."""
    path = tmp_path_factory.mktemp("together")
    source = golden.write_folder(golden.case("llama"), path / "source")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both, reports = path / "both" / "out", [path / "first.json", path / "second.json"]
    started = [
        subprocess.Popen([sys.executable, SCRIPT, str(port), str(i), source, both, report])
        for i, report in enumerate(reports)
    ]
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return source, both, [json.loads(report.read_text()) for report in reports]


def test_each_reads_the_boxes_of_its_devices_alone(saved):
    whole = sum(a.nbytes for a in golden.case("llama").weights.values())
    for report in saved[2]:
        assert report["read"] == report["boxes"] < 0.7 * whole


def test_what_both_save_is_what_one_saves(saved, tmp_path):
    source, both, _ = saved
    flaxen.load(source).save(tmp_path / "one", max_shard_size="100KB")
    files = [{p.name: p.read_bytes() for p in f.iterdir()} for f in (both, tmp_path / "one")]
    assert files[0] == files[1] and len(files[0]) > 3
    assert sorted(p.name for p in both.parent.iterdir()) == ["out", "trained"]


def test_both_generate_what_one_generates(saved):
    alone = flaxen.load(saved[0]).generate(PROMPTS, max_new_tokens=4).tolist()
    assert [report["tokens"] for report in saved[2]] == [alone, alone]


def test_a_training_step_of_both_is_that_of_one(saved):
    source, both, reports = saved
    trained, loss = one_step(flaxen.load(source))
    assert [report["loss"] for report in reports] == pytest.approx([loss, loss], rel=1e-5)
    ours, theirs = paths(trained.module), paths(flaxen.load(both.with_name("trained")).module)
    for path, weight in ours.items():
        np.testing.assert_allclose(theirs[path], weight, atol=1e-6, err_msg=path)


def test_when_one_fails_both_say_so_and_the_old_folder_stays(saved):
    first, second = (report["error"] for report in saved[2])
    assert re.search("Process 1 could not save.*No space left", first)
    assert re.search("out cannot be written .*No space left", second)


def test_the_first_asks_for_rewards_and_both_know_them(saved):
    first, second = (report["rewards"] for report in saved[2])
    assert first["table"] == second["table"] == "[0.25, nan, 0.0]"
    assert (first["calls"], second["calls"]) == (2, 0)
    assert "'reward', asked for step 2, failed: OSError: no judge" in first["error"]
    assert "The reward of step 2 failed on the first process" in second["error"]
