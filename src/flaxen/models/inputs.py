"""What a model may be called with, checked before anything runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache import Cache
from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED


def token_ids(input_ids: Any, vocab: int) -> Any:
    """Ids (B, T) as an array.

    Raises:
        InputError: another shape or dtype, or ids outside the vocabulary.
    """
    ids = array(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.size == 0:
        raise InputError(
            f"input_ids must be whole numbers of shape (batch, length), not {ids.dtype} of "
            f"shape {ids.shape}."
        )
    if isinstance(ids, np.ndarray) and (ids.min() < 0 or ids.max() >= vocab):
        raise InputError(
            f"input_ids lie between {ids.min()} and {ids.max()}; the vocabulary has 0 to "
            f"{vocab - 1}."
        )
    return ids


def fitting(shape: tuple[int, ...], name: str, x: Any) -> Any:
    """An argument that has to have the shape of the ids, or None.

    Raises:
        InputError: another shape, or no whole numbers (a mask may be anything).
    """
    if x is None:
        return None
    x = array(x)
    if name != "attention_mask" and not np.issubdtype(x.dtype, np.integer):
        raise InputError(f"{name} is {x.dtype}; expected whole numbers.")
    if x.shape != shape:
        raise InputError(f"{name} has shape {x.shape}; input_ids have {shape}.")
    return x


def new_tokens(mask: Any, shape: tuple[int, int], cache: Cache) -> Any:
    """Which of the new tokens are real, (B, T), of a mask of these alone, of all tokens up to
    them, or of every slot of the cache.
    """
    if mask is None:
        return np.ones(shape, bool)
    mask, new = array(mask), shape[1]
    if mask.ndim == 2 and mask.shape[1] > new:
        if mask.shape[1] == cache.capacity:
            mask = jax.lax.dynamic_slice_in_dim(jnp.asarray(mask), cache.index, new, axis=1)
        else:
            mask = mask[:, -new:]
    return fitting(shape, "attention_mask", mask).astype(bool)


def only_new_tokens(**given: Any) -> None:
    """
    Raises:
        InputError: for what a call with a cache cannot take.
    """
    extra = [name for name, value in given.items() if value is not None and value is not False]
    if extra:
        raise InputError(
            f"{', '.join(extra)} cannot be used together with past_key_values: a call with a "
            "cache gives logits only. Leave them out, or call without a cache."
        )


def labels_of(labels: Any, shape: tuple[int, int], vocab: int) -> Any:
    """Labels (B, T), or None.

    Raises:
        InputError: another shape, or labels outside the vocabulary.
    """
    labels = fitting(shape, "labels", labels)
    if isinstance(labels, np.ndarray):
        bad = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocab))]
        if bad.size:
            raise InputError(
                f"labels hold {bad[0]}; expected token ids from 0 to {vocab - 1}, or {IGNORED} "
                "for what is not to be predicted."
            )
    return labels


def added_embedding(extra: Any, mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """What is added to the token embeddings, (B, T, D): `extra`, where `mask` (B, T) is not 0.

    Raises:
        InputError: other shapes, or a mask of nothing.
    """
    if extra is None:
        if mask is not None:
            raise InputError("vision_mask says where extra_embedding is added; give that too.")
        return None
    extra = jnp.asarray(extra)
    if extra.shape != shape or not jnp.issubdtype(extra.dtype, jnp.floating):
        raise InputError(
            f"extra_embedding is {extra.dtype} of shape {extra.shape}; expected floats of shape "
            f"{shape}: (batch, length, width)."
        )
    if mask is None:
        return extra
    mask = jnp.asarray(mask)
    if mask.shape != shape[:2]:
        raise InputError(f"vision_mask has shape {mask.shape}; input_ids have {shape[:2]}.")
    return jnp.where(mask[..., None] != 0, extra, 0)


def array(x: Any) -> Any:
    """A jax array as it is, anything else as one of NumPy."""
    return x if isinstance(x, jax.Array) else np.asarray(x)
