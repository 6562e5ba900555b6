"""Processes that write one folder together, and fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flaxen.convert.swap import replacing, writing
from flaxen.core.errors import CheckpointError

ROOM = 4096
"""Bytes that a process can say at a time."""


class Alone:
    """One process, which has nobody to ask."""

    index = 0

    def gather(self, text: str) -> list[str]:
        """What each process says, in their order; all must call it, in the same order."""
        return [text]


class Processes(Alone):
    """All processes of `jax.distributed`."""

    def __init__(self) -> None:
        import jax

        self.index = jax.process_index()

    def gather(self, text: str) -> list[str]:
        from jax.experimental import multihost_utils

        said = text.encode()[:ROOM].ljust(ROOM, b"\0")
        every = multihost_utils.process_allgather(np.frombuffer(said, np.uint8))
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in np.asarray(every)]


def everybody() -> Alone:
    """All processes of `jax.distributed`, or this one if it is alone."""
    import jax

    return Alone() if jax.process_count() == 1 else Processes()


@contextlib.contextmanager
def agreed(team: Alone, what: str = "save") -> Iterator[None]:
    """A step that all processes do; when one of them fails, all do. what: it is, for errors.

    Raises:
        CheckpointError: another process failed; says which one, and why.
    """
    try:
        yield
    except BaseException as error:
        team.gather(f"{type(error).__name__}: {error}")
        raise
    for index, problem in enumerate(team.gather("")):
        if problem:
            raise CheckpointError(f"Process {index} could not {what}. {problem}")


@contextlib.contextmanager
def replacing_together(folder: Path, ours: Callable[[str], bool], team: Alone) -> Iterator[Path]:
    """`replacing` by several processes, the first of which makes the new folder and swaps it in.

    What happens inside, each process must do in steps that are `agreed`.
    """
    with writing(folder), contextlib.ExitStack() as stack:
        made = ""
        with agreed(team):
            if team.index == 0:
                made = str(stack.enter_context(replacing(folder, ours)))
        target = Path(team.gather(made)[0])
        with agreed(team):
            if not target.is_dir():
                raise CheckpointError(
                    f"It does not see {target}. Save to a file system that all processes share."
                )
        yield target
        with agreed(team):
            stack.close()
