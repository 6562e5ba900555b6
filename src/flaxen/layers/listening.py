"""What routers score, for whoever listens above the layers: nobody passes it through by hand."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_heard: contextvars.ContextVar[list[jax.Array] | None] = contextvars.ContextVar(
    "heard", default=None
)


@contextlib.contextmanager
def listening(wanted: bool = True) -> Iterator[list[jax.Array]]:
    """The scores (B, T, E) of all routers that are called in here, in turn; none unless `wanted`.

    What jax traces on its own (a scan's body, what a checkpoint computes again) has to listen
    inside, return what it heard, and have it `told` outside.
    """
    scores: list[jax.Array] = []
    token = _heard.set(scores if wanted else None)
    try:
        yield scores
    finally:
        _heard.reset(token)


def is_heard() -> bool:
    """Whether anybody listens."""
    return _heard.get() is not None


def tell(*scores: jax.Array) -> None:
    """Give scores to who listens, if anybody does."""
    heard = _heard.get()
    if heard is not None:
        heard.extend(scores)
