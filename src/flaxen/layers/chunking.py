"""A layer that is run over pieces of its input, one after the other, to hold less at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.errors import InputError


def apply_chunking_to_forward(
    forward_fn: Callable[..., Any], chunk_size: int, chunk_dim: int, *input_tensors: jax.Array
) -> Any:
    """`forward_fn(*input_tensors)`, computed `chunk_size` at a time along `chunk_dim`.

    The function must treat what lies along that axis piece by piece, and give arrays (or a tree of
    them) with the same axis. It is traced once, however many pieces there are. A size of 0 or less
    means the whole at once.

    Raises:
        InputError: without inputs, for a function of another number of arguments, for inputs of
        other lengths, or where the pieces do not fill the length. The texts are Transformers'.
    """
    if not input_tensors:
        raise InputError(f"{input_tensors} has to be a tuple/list of tensors")
    expected = len(inspect.signature(forward_fn).parameters)
    if expected != len(input_tensors):
        raise InputError(
            f"forward_chunk_fn expects {expected} arguments, but only {len(input_tensors)} input "
            "tensors are given"
        )
    if chunk_size <= 0:
        return forward_fn(*input_tensors)
    length, *others = (x.shape[chunk_dim] for x in input_tensors)
    for other in others:
        if other != length:
            raise InputError(
                f"All input tenors have to be of the same shape: {length}, found shape {other}"
            )
    if length % chunk_size:
        raise InputError(
            f"The dimension to be chunked {length} has to be a multiple of the chunk size "
            f"{chunk_size}"
        )

    def pieces(x: jax.Array) -> jax.Array:
        at = chunk_dim % x.ndim
        x = x.reshape(*x.shape[:at], length // chunk_size, chunk_size, *x.shape[at + 1 :])
        return jnp.moveaxis(x, at, 0)

    def joined(y: jax.Array) -> jax.Array:
        at = chunk_dim % (y.ndim - 1)
        y = jnp.moveaxis(y, 0, at)
        return y.reshape(*y.shape[:at], y.shape[at] * y.shape[at + 1], *y.shape[at + 2 :])

    parts = jax.lax.map(lambda xs: forward_fn(*xs), tuple(map(pieces, input_tensors)))
    return jax.tree.map(joined, parts)
