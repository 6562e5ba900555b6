"""The folder of a run: whether a run can be written there, and that no other is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flaxen.convert.swap import locked, writing
from flaxen.convert.together import agreed, everybody
from flaxen.core.errors import CheckpointError
from flaxen.train.checkpoint import Checkpoints

EXPORTED = ("model", "adapter")
"""What a run makes last, when it has checkpoints."""

MADE = ("checkpoints", *EXPORTED)
"""What a run makes besides its log, which it begins with."""

LOCK = ".lock"


def check_output(output: str | os.PathLike[str]) -> None:
    """
    Raises:
        CheckpointError: nothing can be written there, or what is there is not of a run.
    """
    if not os.fspath(output).strip():
        raise CheckpointError("output is empty; expected the folder that a run is written into.")
    folder = Path(output)
    _check_writable(folder)
    if Checkpoints(folder / "checkpoints", {}).steps():
        return
    logged = (folder / "log.jsonl").exists()
    found = [name for name in (EXPORTED if logged else MADE) if (folder / name).exists()]
    if found:
        lacks = "no checkpoint of its run to go on from" if logged else "no log.jsonl"
        raise CheckpointError(
            f"{folder} holds {' and '.join(found)}, but {lacks}; a run there would replace it. "
            "Train into another folder."
        )


@contextlib.contextmanager
def only_run(output: Path, checkpoints: Checkpoints, step: int) -> Iterator[None]:
    """While it lasts, no other run begins in this folder; a process that dies gives it free.

    Raises:
        CheckpointError: another run is under way there, or has gone on from the checkpoint of
            `step`; or it cannot be written.
    """
    team = everybody()
    with contextlib.ExitStack() as stack:
        with agreed(team, "begin"):
            if team.index == 0:
                stack.enter_context(_locked(output))
                if ([0, *checkpoints.steps()])[-1] != step:
                    raise CheckpointError(f"Another run went on in {output} meanwhile.")
        yield


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    lock = output / LOCK
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        descriptor, _ = locked(lock, output)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _check_writable(folder: Path) -> None:
    there = folder.absolute()
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    if not there.is_dir():
        raise CheckpointError(f"{folder} cannot be a run's folder: {there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written: {there} is read-only for this user.")
