"""A registry of mechanisms; each refuses what it cannot do, and the choice can be explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from flaxen.attention.call import Call, Scene
from flaxen.core.errors import ConfigError
from flaxen.core.registry import Registry

Attend = Callable[[jax.Array, jax.Array, jax.Array, Call, Scene], jax.Array]
"""q (B, T, N, H), k and v (B, S, K, H) -> (B, T, N, H). A query that sees nothing gets zeros."""


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One way of computing attention.

    `refuse(call)` gives the reason why a call cannot be taken, or None. `prefer(call)` is how much
    `auto` wants it there.
    """

    name: str
    attend: Attend
    refuse: Callable[[Call], str | None]
    prefer: Callable[[Call], int]


MECHANISMS: Registry[Mechanism] = Registry("attention mechanism")


def register(mechanism: Mechanism, *, overwrite: bool = False) -> Mechanism:
    """Make a mechanism known by its name everywhere."""
    return MECHANISMS.register(mechanism.name, mechanism, overwrite=overwrite)


def choose(call: Call, wanted: str = "auto") -> Mechanism:
    """The mechanism for a call.

    Raises:
        ConfigError: when the wanted one is unknown or refuses the call.
    """
    if wanted == "auto":
        able = [m for m in MECHANISMS.values() if m.refuse(call) is None]
        return max(able, key=lambda m: m.prefer(call))
    mechanism = MECHANISMS[wanted]
    reason = mechanism.refuse(call)
    if reason:
        raise ConfigError(
            f"Attention {wanted!r} refuses this call: {reason}. Use attention='auto' or another "
            "one."
        )
    return mechanism


def known(wanted: str) -> str:
    """The name itself.

    Raises:
        ConfigError: when it is neither "auto" nor a mechanism's.
    """
    return wanted if wanted == "auto" else MECHANISMS[wanted].name


def explain(call: Call, wanted: str = "auto") -> list[tuple[str, str]]:
    """(mechanism, what speaks for or against it) for a call, the chosen one first."""
    chosen = choose(call, wanted)
    rows = [
        (chosen.name, "chosen" + (", as asked" if wanted != "auto" else f" on {call.platform}"))
    ]
    for mechanism in MECHANISMS.values():
        if mechanism is not chosen:
            reason = mechanism.refuse(call)
            rows.append(
                (mechanism.name, f"refuses: {reason}" if reason else "able, less preferred here")
            )
    return rows
