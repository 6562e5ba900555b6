"""Folders that change all at once."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxen.core.errors import CheckpointError


@contextlib.contextmanager
def replacing(folder: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error.

    It starts with the old folder's files except those that are `ours` by name (hard links, so that
    both folders have them). Write new files by replacing names: contents are shared. What a killed
    process left beside `folder` is removed.

    Raises:
        CheckpointError: `folder` is a file, it cannot be written, or another process is writing it.
    """
    folder = _place(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is written to a folder.")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(folder) as fresh:
            if folder.is_dir():
                _keep(folder, fresh, ours)
            else:
                fresh.mkdir()
            yield fresh
            _take_place(fresh, folder)


def _place(folder: Path) -> Path:
    """The path of a folder, without links: what it names is to be replaced."""
    try:
        place = folder.expanduser().resolve()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} is no place for a folder: {error}.") from error
    if os.path.ismount(place):
        raise CheckpointError(
            f"{place} is where a file system is mounted, so it cannot be replaced by a new "
            "folder. Choose a folder inside it."
        )
    return place


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Let an error of the system name the folder that could not be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error}); what was there is unchanged. Make room, or "
            "choose another folder."
        ) from error


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[Path]:
    """The path of a new folder, for the one process that may write; gone when the block ends.

    The lock is a file that names the new folder: whoever gets the lock of a process that died
    knows what that process left.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    descriptor, sure = locked(lock, folder)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        if sure:
            _sweep(os.read(descriptor, 4096), folder)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps([socket.gethostname(), fresh.name]).encode(), 0)
        yield fresh
    finally:
        _remove(fresh, folder)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def locked(lock: Path, folder: Path) -> tuple[int, bool]:
    """The open lock file of a folder, and whether no other process has it: not every file system
    can lock. The lock ends with its holder.

    Raises:
        CheckpointError: another one writes the folder.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder} is being written by another process. Wait until that has ended, or "
                "choose another folder."
            ) from None
        except OSError:
            return descriptor, False
        # The holder before may have removed the file after it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor, True
        os.close(descriptor)


def _sweep(left: bytes, folder: Path) -> None:
    """Remove what a writer left that died on this host, all of whose locks are seen here."""
    try:
        host, name = json.loads(left)
    except (ValueError, TypeError):
        return
    pattern = rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}"
    if host == socket.gethostname() and re.fullmatch(pattern, str(name)):
        _remove(folder.with_name(name), folder)


def _remove(fresh: Path, folder: Path) -> None:
    """Remove a new folder, whether or not it has taken its place; the old one must not go too."""
    aside = _aside(fresh)
    if aside.exists() and not folder.exists():
        aside.rename(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


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
    _sync(fresh)
    if not folder.exists():
        fresh.rename(folder)
    else:
        here = _here()
        if not _exchange(fresh, folder):
            folder.rename(_aside(fresh))
            fresh.rename(folder)
            _aside(fresh).rename(fresh)
        if here is not None and here.is_relative_to(folder):
            os.chdir(here)
    _sync(folder.parent)


def _here() -> Path | None:
    """The current directory, unless somebody removed it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _aside(fresh: Path) -> Path:
    return fresh.with_name(f"{fresh.name}.old")


def _sync(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Let two paths swap what they name, atomically; False if this system cannot."""
    system = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD; RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
    if hasattr(system, "renameat2"):
        return system.renameat2(here, os.fsencode(a), here, os.fsencode(b), swap) == 0
    if hasattr(system, "renamex_np"):
        return system.renamex_np(os.fsencode(a), os.fsencode(b), swap) == 0
    return False
