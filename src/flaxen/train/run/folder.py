"""The folder of a run: whether a run can be written there."""

from __future__ import annotations

import os
from pathlib import Path

from flaxen.core.errors import CheckpointError
from flaxen.train.checkpoint import Checkpoints

MADE = ("checkpoints", "model", "adapter")
"""What a run makes besides its log, which it begins with."""


def check_output(output: str | os.PathLike[str]) -> None:
    """
    Raises:
        CheckpointError: nothing can be written there, or what is there is not of a run.
    """
    if not os.fspath(output).strip():
        raise CheckpointError("output is empty; expected the folder that a run is written into.")
    folder = Path(output)
    _check_writable(folder)
    if (folder / "log.jsonl").exists() or Checkpoints(folder / "checkpoints", {}).steps():
        return
    found = [name for name in MADE if (folder / name).exists()]
    if found:
        raise CheckpointError(
            f"{folder} holds {' and '.join(found)}, but no log.jsonl: not what a run leaves. "
            "Train into another folder."
        )


def _check_writable(folder: Path) -> None:
    there = folder.absolute()
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    if not there.is_dir():
        raise CheckpointError(f"{folder} cannot be a run's folder: {there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written: {there} is read-only for this user.")
