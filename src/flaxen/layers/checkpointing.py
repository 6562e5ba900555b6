"""What the backward pass computes again instead of remembering it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from flaxen.core.checks import at_least
from flaxen.core.errors import ConfigError
from flaxen.core.registry import Registry

_jax = jax.checkpoint_policies

POLICIES: Registry[Callable[..., Any]] = Registry("checkpointing policy")
"""What of a layer is kept, by name. `block` and `nothing`: its input only; `dots`: results of
products; `dots_with_no_batch_dims`: those of products with weights; `offload`: these, in the memory
of the host; `everything`: all of it, as without checkpointing.
"""

for _name, _policy in {
    "block": _jax.nothing_saveable,
    "nothing": _jax.nothing_saveable,
    "dots": _jax.checkpoint_dots,
    "dots_with_no_batch_dims": _jax.checkpoint_dots_with_no_batch_dims,
    "offload": _jax.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "everything": _jax.everything_saveable,
}.items():
    POLICIES.register(_name, _policy)


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """How layers are computed again in the backward pass.

    policy: one of `POLICIES`; None is off. every: the layers whose index divides by it; the others
    remember everything.

    Raises:
        ConfigError: no such policy, `every` below 1, or a device without host memory to offload to.
    """

    policy: str | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.policy is not None:
            POLICIES[self.policy]
        at_least("checkpointing.every", self.every, 1)
        if self.policy == "offload":
            _check_offload()

    def covers(self, index: int) -> bool:
        """Whether the layer of this index is computed again."""
        return self.policy is not None and index % self.every == 0


def _check_offload() -> None:
    device = jax.local_devices()[0]
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if "pinned_host" not in kinds:
        raise ConfigError(
            f"Checkpointing with policy 'offload' keeps results in pinned_host memory, and this "
            f"{device.platform} device has {', '.join(kinds)}. Use 'dots_with_no_batch_dims', "
            "which keeps them on the device, or 'block', which keeps none."
        )


def checkpointing_of(remat: bool | str | Checkpointing | None) -> Checkpointing:
    """What `load(remat=...)` asks for: True is the policy `block`."""
    if isinstance(remat, Checkpointing):
        return remat
    return Checkpointing("block" if remat is True else remat or None)


def checkpointed(
    layer: Callable[..., Any], checkpointing: Checkpointing, index: int, *, scanned: bool = False
) -> Callable[..., Any]:
    """The call of a layer, computed again in the backward pass if its index is covered.

    The results are the same. `layer` may be any function of arrays and pytrees. scanned: it is
    called inside `jax.lax.scan`, where nothing needs to keep the compiler from sharing work between
    forward and backward pass.
    """
    if not checkpointing.covers(index):
        return layer
    return jax.checkpoint(
        layer, policy=POLICIES[checkpointing.policy or ""], prevent_cse=not scanned
    )


def cache_in_training(cache: Any, checkpointing: Checkpointing, training: bool, kind: type) -> Any:
    """The cache of a call; with checkpointing, a call in training goes without one."""
    if cache is None or not training or checkpointing.policy is None:
        return cache
    _warn_once(kind.__name__)
    return None


@functools.cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"Caching is incompatible with gradient checkpointing in {name}. Setting "
        "`past_key_values=None`.",
        stacklevel=2,
    )
