"""Stopping a run cleanly when the system or the user asks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Stopped = Callable[[], int]
"""The number of the signal that came, 0 as long as none did. Processes that train together all ask
at the same places, and all get the same answer.
"""


@contextlib.contextmanager
def stop_signals() -> Iterator[Stopped]:
    """Whether SIGTERM or SIGINT came, to any of the processes; a second one has its usual effect.

    Outside the main thread, where Python delivers no signals, none comes.
    """
    came: list[int] = []
    stopped = _agreed(lambda: came[0] if came else 0)
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore() -> None:
        for kind, handler in before.items():
            # None: set by another library than Python, which cannot set it back.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        restore()
        with contextlib.suppress(OSError):
            os.write(2, b"\nStopping when what is under way is done; once more stops at once.\n")

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield stopped
    finally:
        restore()


def _agreed(mine: Stopped) -> Stopped:
    """The greatest of what all processes say, one call late: so no device waits for the answer."""
    if jax.process_count() == 1:
        return mine
    mesh = Mesh(np.array(jax.devices()), "device")
    each, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["device"], []))
    greatest = jax.jit(jnp.max, out_shardings=everywhere)
    asked: list[jax.Array] = []

    def stopped() -> int:
        said = jax.make_array_from_callback(
            (mesh.size,), each, lambda index: np.full(1, mine(), np.int32)
        )
        asked.append(greatest(said))
        return int(asked.pop(0)) if len(asked) > 1 else 0

    return stopped
