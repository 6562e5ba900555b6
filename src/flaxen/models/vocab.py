"""The tokens of a decoder: more of them, fewer, or rows up to a size that a mesh divides."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from flaxen.core.errors import ConfigError
from flaxen.shard import Placement

SPREAD = 1e-9
"""Of new rows around the mean, as a share of the old rows' covariance, as in Transformers."""


def on_vocab(decoder: Any, change: Callable[[str, Any], Any]) -> Any:
    """The decoder with `change(path, weight)` in place of each weight that has a row for every
    token: the table of embeddings, and weight and bias of the head.
    """
    table, head = decoder.embed_tokens, decoder.lm_head
    shift = None if table.bias is None else change("embed_tokens.bias", table.bias)
    weight = change("embed_tokens.weight", table.weight)
    table = dataclasses.replace(table, weight=weight, bias=shift)
    if head is not None:
        bias = None if head.bias is None else change("lm_head.bias", head.bias)
        head = dataclasses.replace(head, weight=change("lm_head.weight", head.weight), bias=bias)
    return dataclasses.replace(decoder, embed_tokens=table, lm_head=head)


def unpadded(decoder: Any, cut: Callable[[Any, int], Any]) -> Any:
    """The decoder without rows of no token; `cut(weight, rows)` keeps the first rows."""
    table = decoder.embed_tokens
    vocab = None if table is None else table.vocab
    if vocab is None:
        return decoder
    decoder = on_vocab(decoder, lambda _, weight: cut(weight, vocab))
    return _with_vocab(decoder, None)


def padded(decoder: Any, rows: int, placement: Placement | None) -> Any:
    """The decoder with zero rows up to `rows`, which no token has and nothing chooses."""
    vocab = decoder.embed_tokens.vocab_size
    change = lambda path, weight: _changed(path, weight, rows, placement, _with_zeros)
    decoder = on_vocab(unpadded(decoder, lambda weight, n: weight[:n]), change)
    return _with_vocab(decoder, vocab if rows > vocab else None)


def resized(
    decoder: Any, rows: int, placement: Placement | None, *, std: float | None, seed: int
) -> Any:
    """The decoder with so many tokens: the first ones stay, new ones follow.

    std: of new rows around zero (new biases are zero); None draws them around the mean of the old
    ones, with `SPREAD` of their covariance.
    """

    def change(path: str, weight: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        return _changed(path, weight, rows, placement, partial(_with_drawn, key=key, std=std))

    return on_vocab(unpadded(decoder, lambda weight, n: weight[:n]), change)


def _with_vocab(decoder: Any, vocab: int | None) -> Any:
    table = dataclasses.replace(decoder.embed_tokens, vocab=vocab)
    return dataclasses.replace(decoder, embed_tokens=table)


def _changed(
    path: str, weight: Any, rows: int, placement: Placement | None, make: Callable[..., jax.Array]
) -> jax.Array:
    """`make(weight, rows)`, laid out as the plan says of a weight of that size."""
    if not isinstance(weight, jax.Array | np.ndarray):
        raise ConfigError(
            f"{path} is a {type(weight).__name__}, whose rows cannot be changed. Load the model "
            "with quantized='dequantize' and without abstract=True or bits= for it, and merge "
            "adapters."
        )
    where = None
    if placement is not None:
        axes = {"vocab": rows} | ({"embed": weight.shape[1]} if weight.ndim > 1 else {})
        where = NamedSharding(placement.mesh, placement.weight_spec(axes))
    return jax.jit(make, static_argnums=1, out_shardings=where)(weight, rows)


def _with_zeros(weight: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(weight, [(0, rows - len(weight)), *[(0, 0)] * (weight.ndim - 1)])


def _with_drawn(weight: jax.Array, rows: int, *, key: jax.Array, std: float | None) -> jax.Array:
    old, more = len(weight), rows - len(weight)
    if more <= 0:
        return weight[:rows]
    if std is not None:
        drawn = std * jax.random.normal(key, (more, *weight.shape[1:])) * (weight.ndim > 1)
    else:
        wide = weight.astype(jnp.float32)
        mean = wide.mean(0)
        # A random mixture of the centred rows has exactly their covariance.
        mixed = lambda key: jnp.tensordot(jax.random.normal(key, (old,)), wide - mean, 1)
        drawn = mean + (SPREAD / old) ** 0.5 * jax.lax.map(mixed, jax.random.split(key, more))
    return jnp.concatenate([weight, drawn.astype(weight.dtype)])
