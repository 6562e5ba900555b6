"""The command line as a whole: quick help, clear errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import golden
import pytest

import flaxen
from flaxen import cli
from flaxen.cli.options import whole_number

HELP = """
import json, sys, time
from flaxen.cli import main
main(["--help"])
print(json.dumps([time.process_time(), sorted(sys.modules)]), file=sys.stderr)
"""


def test_help_is_quick_and_imports_no_jax():
    # Processor time from the start of Python on: other work on the machine does not count.
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", HELP], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stderr.splitlines()[-1]))
    assert min(seconds for seconds, _ in runs) < 0.5
    assert not {"jax", "numpy", "transformers", "flaxen.cli.generate"} & set(runs[0][1])
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([command, "--help"]) == 0
    assert f"flaxen {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == flaxen.__version__


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setitem(vars(flaxen), "tokenizer", fail)
    return ["generate", "no/such/model", "Hello"]


def test_what_the_user_can_mend_is_one_message_and_status_2(monkeypatch, capsys):
    arguments = failing(monkeypatch, flaxen.CheckpointError("There is no [folder]; make one."))
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.strip() == "Error: There is no [folder]; make one."
    assert said.out == ""


def test_a_traceback_comes_when_asked_for(monkeypatch):
    monkeypatch.setenv("FLAXEN_TRACEBACK", "1")
    with pytest.raises(flaxen.CheckpointError):
        cli.main(failing(monkeypatch, flaxen.CheckpointError("broken")))


def test_other_errors_are_not_hidden(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        cli.main(failing(monkeypatch, ZeroDivisionError()))


def test_ctrl_c_ends_quietly(monkeypatch, capsys):
    assert cli.main(failing(monkeypatch, KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    absent = ModuleNotFoundError("No module named 'optax'", name="optax")
    assert cli.main(failing(monkeypatch, absent)) == 2
    assert "pip install 'flaxen[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1_000", 1000), ("2m", 2e6)],
)
def test_human_numbers(text: str, size: int):
    assert whole_number(text) == size


@pytest.mark.parametrize("text", ["", "k", "1.5", "-3", "ten", "1e3"])
def test_what_is_no_whole_number_is_refused(text: str):
    with pytest.raises(ValueError, match="no whole number"):
        whole_number(text)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("redirected", "status"),
    [
        pytest.param(">&-", 0, marks=pytest.mark.exhaustive),
        (">/dev/full", 2),
        ("| head -c 0", 141),
    ],
)
def test_output_that_nobody_takes_is_no_traceback(tmp_path, redirected, status):
    golden.write_folder(golden.case("llama"), tmp_path)
    script = f"set -o pipefail; {sys.executable} -m flaxen show {tmp_path} {redirected}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_an_encoding_without_our_marks_gets_others(tmp_path):
    golden.write_folder(golden.case("llama"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "flaxen", "diff", str(tmp_path), str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stdout[:7]) == (0, b"? equal")
