"""A prompt's cache as a safetensors file, to go on from another day."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache.cache import Cache
from flaxen.cache.codec import CODECS, AsIs
from flaxen.cache.ring import Ring
from flaxen.cache.settings import CacheSettings
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.dtypes import float_dtype
from flaxen.convert.formats.safetensors import read_header
from flaxen.convert.formats.source import FileMap, FileTensor
from flaxen.convert.formats.writing import write_file
from flaxen.convert.lazy import ByteCounter, concrete
from flaxen.core.checks import at_least
from flaxen.core.errors import CacheError
from flaxen.core.plain import from_plain
from flaxen.core.tree import paths, rebuild

KEY = "flaxen_cache"
"""Where the file's metadata say what it is."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a file holds. model: the fingerprint of the model that made it."""

    model: str
    batch: int
    length: int
    dtype: str
    layout: str
    codec: str | None
    page_size: int

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        at_least("length", self.length, 1)
        float_dtype(self.dtype)
        _ = self.settings

    @property
    def settings(self) -> CacheSettings:
        return CacheSettings(layout=self.layout, codec=self.codec, page_size=self.page_size)


def fingerprint(config: str, weights: Iterable[Any]) -> str:
    """A name for a model: its configuration, and the first few values of each of its weights."""
    name = hashlib.sha256(config.encode())
    for corner in jax.device_get(_corners(list(weights))):
        name.update(np.asarray(corner, np.float32).tobytes())
    return name.hexdigest()


@jax.jit
def _corners(weights: list[jax.Array]) -> list[jax.Array]:
    return [x[(0,) * (x.ndim - 1)][:8] if x.ndim else x for x in weights]


def save(cache: Cache, path: str | Path, model: str) -> None:
    """Write a cache, beside its place first; `model` is the fingerprint of the model that made it.

    Quantised vectors are written as they are.
    """
    path, codec = Path(path), cache.layouts[0].codec
    about = Stored(
        model=model,
        batch=cache.keep.shape[0],
        length=cache.capacity,
        dtype=jnp.dtype(codec.dtype).name,
        layout=_layout(cache),
        codec=None if isinstance(codec, AsIs) else _name(codec),
        page_size=CacheSettings.page_size if cache.pages is None else cache.pages.size,
    )
    tensors = {name: ArrayTensor(x) for name, x in paths(cache).items()}
    aside = path.with_name(f"{path.name}.part")
    write_file(aside, tensors, {KEY: json.dumps(dataclasses.asdict(about))})
    os.replace(aside, path)


def _layout(cache: Cache) -> str:
    if cache.pages is not None:
        return "paged"
    return "ring" if any(isinstance(x, Ring) for x in cache.layouts) else "dense"


def _name(codec: Any) -> str:
    return next(name for name, kind in CODECS.items() if kind is type(codec))


def stored(path: str | Path) -> Stored:
    """What a file holds.

    Raises:
        CacheError: when it is no cache. CheckpointError: when it is damaged.
    """
    _, metadata = read_header(Path(path))
    try:
        return from_plain(Stored, json.loads(metadata[KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(
            f"{path} is no saved cache; expected a file that save_cache wrote."
        ) from error


def load(path: str | Path, like: Cache, model: str) -> Cache:
    """Read a cache back, bit by bit. like: the shapes and places of its arrays; model: the
    fingerprint of the model that is to go on from it.

    Raises:
        CacheError: for the cache of another model, or of other shapes.
    """
    path, about = Path(path), stored(path)
    if about.model != model:
        raise CacheError(
            f"{path} was written by a model with another configuration or other weights; a cache "
            "is of use to the model that made it alone. Read the text again."
        )
    entries, _ = read_header(path)
    if "shift" in entries and like.shift is None:
        # Only a prompt with pictures has one.
        shape = jax.ShapeDtypeStruct(like.lengths.shape, jnp.int32, sharding=like.lengths.sharding)
        like = dataclasses.replace(like, shift=shape)
    wanted = paths(like)
    found = {name: (x.shape, jnp.dtype(x.dtype)) for name, x in entries.items()}
    asked = {name: (tuple(x.shape), jnp.dtype(x.dtype)) for name, x in wanted.items()}
    wrong = [name for name in sorted(found | asked) if found.get(name) != asked.get(name)]
    if wrong:
        name = wrong[0]
        raise CacheError(
            f"{path} has {name} as {_say(found.get(name))}, and {_say(asked.get(name))} is asked "
            f"for ({len(wrong)} arrays differ). Ask for {about.batch} rows of {about.length} "
            f"tokens, layout {about.layout!r}, codec {about.codec!r}."
        )
    source = FileMap(path, ByteCounter())
    arrays = {
        name: _array(FileTensor(source, entries[name]), x.sharding) for name, x in wanted.items()
    }
    return rebuild(like, arrays)


def _array(tensor: FileTensor, where: Any) -> jax.Array:
    """Its own copy: generation writes into a cache, and must not write into a file."""
    where = where or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    read = lambda box: np.array(tensor.read(concrete(box, tensor.shape)))
    return jax.make_array_from_callback(tensor.shape, where, read)


def _say(kind: tuple[tuple[int, ...], Any] | None) -> str:
    return "nothing" if kind is None else f"{kind[1].name}{list(kind[0])}"
