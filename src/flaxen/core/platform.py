"""Which kind of device a computation is written for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: the default backend, unless `compiling_for` says otherwise."""
    name = _platform.get() or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Trace for hardware that is not here."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)
