"""Stopping a run cleanly when the system or the user asks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM or SIGINT came; a second one has its usual effect.

    Outside the main thread, where Python delivers no signals, it always says no.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def note(number: int, frame: FrameType | None) -> None:
        came.set()
        restore()
        os.write(2, b"\nStopping after this step; once more stops at once.\n")

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield came.is_set
    finally:
        restore()
