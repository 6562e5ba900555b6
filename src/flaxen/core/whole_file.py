"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, whose file takes the name `path` once all is written: whoever is stopped
    before leaves an older file as it was. Pipes and devices are written to as they are.

    Raises:
        OSError: as writing does.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield aside
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
