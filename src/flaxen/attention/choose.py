"""A registry of mechanisms; each refuses what it cannot do, and the choice can be explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from flaxen.attention.call import NOTHING, Call, Extras, Scene
from flaxen.attention.settings import AttentionSettings
from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.registry import Registry


class Attend(Protocol):
    """q (B, T, N, H), k (B, S, K, H), v (B, S, K, Hv) -> (B, T, N, Hv). A query that sees nothing
    gets zeros; a key that nobody sees may hold anything.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        call: Call,
        scene: Scene,
        extras: Extras = NOTHING,
        /,
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One way of computing attention.

    `refuse(call)` gives the reason why a call cannot be taken, or None. `prefer(call)` is how much
    `auto` wants it there. `absent(platform)` is the reason why no call can be taken on such devices
    (cpu, gpu or tpu), or None.
    """

    name: str
    attend: Attend
    refuse: Callable[[Call], str | None]
    prefer: Callable[[Call], int]
    absent: Callable[[str], str | None] = lambda platform: None


MECHANISMS: Registry[Mechanism] = Registry("attention mechanism")


def register(mechanism: Mechanism, *, overwrite: bool = False) -> Mechanism:
    """Make a mechanism known by its name everywhere."""
    return MECHANISMS.register(mechanism.name, mechanism, overwrite=overwrite)


def mechanisms(settings: AttentionSettings) -> dict[str, Mechanism]:
    """Those that everybody has, and on top those of one model."""
    return dict(MECHANISMS) | {m.name: m for m in settings.own}


def choose(call: Call) -> Mechanism:
    """The mechanism for a call.

    Raises:
        ConfigError: when the wanted one is unknown or refuses the call.
    """
    able, wanted = mechanisms(call.settings), known(call.settings).mechanism
    if wanted == "auto":
        return max(
            (m for m in able.values() if m.refuse(call) is None), key=lambda m: m.prefer(call)
        )
    reason = able[wanted].refuse(call)
    if reason:
        raise ConfigError(
            f"Attention {wanted!r} refuses this call: {reason}. Use attention='auto' or another "
            "one."
        )
    return able[wanted]


def known(settings: AttentionSettings) -> AttentionSettings:
    """The settings themselves.

    Raises:
        ConfigError: when they name neither "auto" nor a mechanism.
    """
    wanted, able = settings.mechanism, mechanisms(settings)
    if not isinstance(wanted, str) or (wanted != "auto" and wanted not in able):
        near = did_you_mean(str(wanted), able)
        raise ConfigError(f"Unknown attention mechanism {wanted!r}.{near}")
    return settings


def runnable(settings: AttentionSettings, platform: str) -> None:
    """
    Raises:
        ConfigError: when they name a mechanism that such devices cannot run at all.
    """
    able, wanted = mechanisms(settings), known(settings).mechanism
    reason = None if wanted == "auto" else able[wanted].absent(platform)
    if reason:
        raise ConfigError(
            f"Attention {wanted!r} cannot run here: {reason}. Use attention='auto' or another one."
        )


def explain(call: Call) -> list[tuple[str, str]]:
    """(mechanism, what speaks for or against it) for a call, the chosen one first."""
    chosen, asked = choose(call), call.settings.mechanism != "auto"
    rows = [(chosen.name, "chosen" + (", as asked" if asked else f" on {call.platform}"))]
    for mechanism in mechanisms(call.settings).values():
        if mechanism is not chosen:
            reason, less = mechanism.refuse(call), (mechanism.prefer(call), chosen.prefer(call))
            able = "able" if asked else "able, preferred {} against {} here".format(*less)
            rows.append((mechanism.name, f"refuses: {reason}" if reason else able))
    return rows
