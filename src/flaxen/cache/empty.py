"""Caches before they exist: shapes from what is asked, checked against memory, then filled with
zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache.cache import Cache
from flaxen.cache.codec import Codec, codec_for
from flaxen.cache.dense import AXES, Dense, Latent
from flaxen.cache.layout import KeysValues
from flaxen.cache.paged import Paged, Pages
from flaxen.cache.recurrent import Recurrent
from flaxen.cache.ring import Ring
from flaxen.cache.settings import CacheSettings
from flaxen.core.errors import CacheError
from flaxen.shard import Placement

DEFAULT = CacheSettings()


@dataclasses.dataclass(frozen=True)
class Order:
    """What is asked of a cache: `length` tokens for each of `batch` rows. layers: for how many
    equal layers together, stacked in front.
    """

    batch: int
    length: int
    dtype: Any
    settings: CacheSettings = DEFAULT
    placement: Placement | None = None
    layers: int | None = None

    @property
    def codec(self) -> Codec:
        return codec_for(self.settings.codec, self.dtype)

    @property
    def pages(self) -> int:
        """Pages for one row."""
        return -(-self.length // self.settings.page_size)

    def array(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any) -> Any:
        """One array: its shape and place. An axis of which the plan does not speak stays whole."""
        where = self.placement
        if where is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        cut = self.settings.sharded
        sharding = where.activation(shape, axes) if cut else where.replicated()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def vectors(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        """What the codec stores of vectors in a layer (or of all stacked ones)."""
        if self.layers is not None:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        stored = _stored(self.codec, shape)
        return jax.tree.map(lambda x: self.array(x.shape, axes, x.dtype), stored)


@functools.lru_cache(maxsize=64)
def _stored(codec: Codec, shape: tuple[int, ...]) -> Any:
    """The shapes of what a codec makes of vectors; most layers ask for the same."""
    return jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, codec.dtype))


def keys_and_values(
    order: Order, heads: int, head_dim: int, v_head_dim: int, window: int | None = None
) -> KeysValues:
    """An attention layer's memory, for `heads` key heads; a window's layer may be a ring."""
    layout, axes = order.settings.layout, AXES
    if layout == "paged":
        kind, axes = Paged, ("pages", "kv_heads", "slots", "head_dim")
        shape = (order.batch * order.pages, heads, order.settings.page_size)
    elif window and (layout == "ring" or (layout == "auto" and window < order.length)):
        kind, shape = Ring, (order.batch, heads, window)
    else:
        kind, shape = Dense, (order.batch, heads, order.length)
    k, v = (order.vectors((*shape, size), axes) for size in (head_dim, v_head_dim))
    return kind(k=k, v=v, codec=order.codec)


def latents(order: Order, rank: int, head_dim: int) -> Latent:
    """The memory of multi-head latent attention: `rank` channels, and a key of `head_dim`.

    Raises:
        CacheError: for pages, which this layout does not have.
    """
    if order.settings.layout == "paged":
        raise CacheError(
            "Latent attention has no pages: what it remembers of a token is small. "
            "Use layout='auto' for this model."
        )
    latent, rope = (
        order.vectors((order.batch, order.length, size), ("batch", "keys", "head_dim"))
        for size in (rank, head_dim)
    )
    return Latent(latent=latent, rope=rope, codec=order.codec)


def states(
    order: Order, conv: Iterable[Mapping[str, int]] = (), state: Mapping[str, int] | None = None
) -> Recurrent:
    """A recurrent layer's memory for each row: the axes, by name and size, of the last inputs of
    each of its convolutions, and of its state.
    """
    exact = dataclasses.replace(order, dtype=jnp.float32, settings=_uncoded(order.settings))
    vectors = lambda order, axes: order.vectors(
        (order.batch, *axes.values()), ("batch", *axes.keys())
    )
    return Recurrent(
        conv=tuple(vectors(order, axes) for axes in conv),
        state=None if state is None else vectors(exact, state),
        codec=order.codec,
    )


def _uncoded(settings: CacheSettings) -> CacheSettings:
    return dataclasses.replace(settings, codec=None)


def described(order: Order, layers: Any) -> Cache:
    """A cache as shapes, from its layers' shapes."""
    rows = order.batch
    pages = None
    if order.settings.layout == "paged":
        table = order.array((rows, order.pages), ("batch", "pages"), jnp.int32)
        pages = Pages(table=table, count=rows * order.pages, size=order.settings.page_size)
    return Cache(
        layers=layers,
        index=order.array((), (), jnp.int32),
        keep=order.array((rows, order.length), ("batch", "slots"), jnp.bool_),
        lengths=order.array((rows,), ("batch",), jnp.int32),
        pages=pages,
    )


def empty(shapes: Cache) -> Cache:
    """A cache without tokens, of the given shapes."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
    cache = jax.tree.map(zeros, shapes)
    if cache.pages is None:
        return cache
    pages = dataclasses.replace(cache.pages, table=cache.pages.table - 1)
    return dataclasses.replace(cache, pages=pages)


def check_memory(shapes: Cache) -> None:
    """Check that a cache fits into the memory that is free now.

    Raises:
        CacheError: with the bytes that are asked for and those that are available.
    """
    leaves = jax.tree.leaves(shapes)
    mesh = next((x.sharding.mesh for x in leaves if x.sharding is not None), None)
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    asked = sum(
        math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape) * x.dtype.itemsize
        for x in leaves
    )
    for device in devices:
        stats, needed = device.memory_stats() or {}, asked
        if "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats["bytes_in_use"]
        elif device.platform == "cpu":
            # All CPU devices share one memory.
            needed, free = asked * len(devices), host_memory()
        else:
            continue
        if free is not None and needed > free:
            rows, length = shapes.keep.shape
            raise CacheError(
                f"A cache of {rows} rows and {length} tokens takes {needed:,} bytes, and {free:,} "
                f"are available on {device}. Ask for fewer, or store them smaller: "
                "cache='int8'."
            )


def host_memory() -> int | None:
    """Bytes that this machine could still give, where it says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
