"""Attention and mask functions by name, as code written for Transformers registers them.

A map that all instances share, and under it one of each instance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Mask, Scene, visible
from flaxen.attention.choose import Mechanism
from flaxen.attention.online import score_bias


class GeneralInterface(MutableMapping[str, Callable[..., Any]]):
    """Names to functions: an instance's own come before those registered for its class.

    Setting and deleting touch the instance alone.

    Raises:
        KeyError: for a name that neither knows, or when deleting what is not the instance's own.
    """

    _global_mapping: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init_subclass__(cls) -> None:
        cls._global_mapping = {}

    def __init__(self) -> None:
        self._local_mapping: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, key: str) -> Callable[..., Any]:
        return (self._local_mapping if key in self._local_mapping else self._global_mapping)[key]

    def __setitem__(self, key: str, value: Callable[..., Any]) -> None:
        self._local_mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._local_mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._global_mapping | self._local_mapping)

    def __len__(self) -> int:
        return len(self._global_mapping | self._local_mapping)

    @classmethod
    def register(cls, key: str, value: Callable[..., Any]) -> None:
        """Make a function known to every instance, those that exist already too."""
        cls._global_mapping[key] = value

    def valid_keys(self) -> list[str]:
        return list(self)


class AttentionInterface(GeneralInterface):
    """Functions of (module, q (B, N, T, H), k (B, K, S, H), v, attention_mask, scaling=, dropout=,
    ...) that give (result (B, T, N, Hv), weights or None).
    """

    _warned: ClassVar[set[str]] = set()

    def get_interface(
        self, attn_implementation: str | None, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function of that name; `eager`, and nothing asked, are the default.

        Raises:
            KeyError: for a name that is not registered.
        """
        name = attn_implementation
        if name is None:
            self._warn_once("No attention implementation was asked for; the default is used.")
        elif name.startswith("paged|") and name != "paged|eager":
            self._warn_once(f"{name!r} has no pages here; {name.removeprefix('paged|')!r} is used.")
            name = name.removeprefix("paged|")
        if name is None or name == "eager":
            return default
        if name not in self:
            raise KeyError(
                f"`{name}` is not a valid attention implementation registered in the "
                "`AttentionInterface`"
            )
        return self[name]

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


class AttentionMaskInterface(GeneralInterface):
    """Functions of (mask, scene, dtype) that spell a mask out, (B, 1, T, S)."""


def sdpa_mask(mask: Mask, scene: Scene, dtype: Any = jnp.float32) -> jax.Array | None:
    """True where a query sees a key; None where the causal order of a whole sequence says it all."""
    plain = Mask()
    hides = scene.keep is not None or scene.q_segments is not None
    if mask == plain and scene.aligned and not hides:
        return None
    return visible(mask, scene)[:, None]


def eager_mask(mask: Mask, scene: Scene, dtype: Any = jnp.float32) -> jax.Array:
    """0 where a query sees a key, and the least number of the dtype elsewhere: to be added."""
    least = jnp.finfo(dtype).min
    return jnp.where(visible(mask, scene)[:, None], 0, least).astype(dtype)


AttentionMaskInterface.register("sdpa", sdpa_mask)
AttentionMaskInterface.register("eager", eager_mask)


def from_hf_function(
    name: str, function: Callable[..., Any], mask_function: Callable[..., Any] = eager_mask
) -> Mechanism:
    """A function of Transformers' kind as a mechanism; `mask_function` spells its mask out.

    `register` it for all models, or put it into `AttentionSettings(name, own=(it,))` of one.
    """

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        call: Call,
        scene: Scene,
        extras: Extras = NOTHING,
        /,
    ) -> jax.Array:
        mask = mask_function(call.mask, scene, q.dtype)
        bias = score_bias(scene, extras)
        if bias is not None:
            mask = bias if mask is None else mask + bias
        heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return function(
            call, *heads_first, mask, scaling=call.scale, dropout=0.0, softcap=call.softcap
        )[0]

    return Mechanism(name, attend, _refuse, prefer=lambda call: 0)


def _refuse(call: Call) -> str | None:
    """What the interface has no argument for."""
    if call.sinks:
        return "its interface has no sinks"
    return "its interface has no key for dropout" if call.dropout else None
