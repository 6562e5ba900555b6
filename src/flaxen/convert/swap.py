"""Folders that change all at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxen.core.errors import CheckpointError


@contextlib.contextmanager
def replacing(folder: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error.

    It starts with the old folder's files except those that are `ours` by name (hard links, so that
    both folders have them). Write new files by replacing names: contents are shared.

    Raises:
        CheckpointError: `folder` is a file, or it cannot be written.
    """
    folder = folder.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is written to a folder.")
    fresh = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            _keep(folder, fresh, ours)
        else:
            fresh.mkdir()
        yield fresh
        _take_place(fresh, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error}); what was there is unchanged. Make room, or "
            "choose another folder."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _keep(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    def skipped(where: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(where) == old and ours(name)}

    shutil.copytree(old, new, symlinks=True, ignore=skipped, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def _take_place(fresh: Path, folder: Path) -> None:
    """Swap in one step where the system can, else in two renames."""
    if not folder.exists():
        fresh.rename(folder)
        return
    here = Path.cwd() == folder
    if not _exchange(fresh, folder):
        aside = fresh.with_name(fresh.name + ".old")
        folder.rename(aside)
        fresh.rename(folder)
        aside.rename(fresh)
    if here:
        os.chdir(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Let two paths swap what they name, atomically; False if this system cannot."""
    system = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD; RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
    if hasattr(system, "renameat2"):
        return system.renameat2(here, os.fsencode(a), here, os.fsencode(b), swap) == 0
    if hasattr(system, "renamex_np"):
        return system.renamex_np(os.fsencode(a), os.fsencode(b), swap) == 0
    return False
