"""What every call of a Model needs: its weights, the key of dropout, what follows a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache import Cache
from flaxen.core.errors import CacheError, InputError
from flaxen.core.tree import Param, walk
from flaxen.layers.routers import Router
from flaxen.models.inputs import array, fitting
from flaxen.models.outputs import CausalOutput


def weights(module: Any, params: Any, add_params_field: bool) -> Any:
    """The parts to run: `module`, or with the weights of `params`, a tree of the same structure.

    Raises:
        InputError: another structure; or an abstract one.
    """
    if params is not None:
        if isinstance(params, Mapping) and set(params) == {"params"}:
            if not add_params_field:
                raise InputError(
                    "params is {'params': ...}; pass add_params_field=True, or the tree alone."
                )
            params = params["params"]
        if jax.tree.structure(params) != jax.tree.structure(module):
            raise InputError(
                f"params is a {type(params).__name__} of another structure than this model; "
                "expected its `module`, with other numbers in it."
            )
        module = params
    if any(isinstance(leaf, Param) for leaf in jax.tree.leaves(module)[:1]):
        raise InputError("This model is abstract: load it without abstract=True to run it.")
    return module


def dropout_key(module: Any, rng: Any, train: bool) -> jax.Array | None:
    """The key of a training call; None where nothing is dropped.

    Raises:
        InputError: a model with dropout trains without a key.
    """
    if not train or not any(getattr(part, "dropout", 0.0) for part in walk(module)):
        return None
    if not isinstance(rng, jax.Array):
        raise InputError(
            f"dropout_rng is {rng!r}; with train=True this model drops numbers at random: pass "
            "dropout_rng=jax.random.key(0), or train=False."
        )
    return rng


def router_logits(module: Any, asked: bool | None) -> bool | None:
    """Whether a call gives the scores of routers; None is what the config says.

    Raises:
        InputError: a model without routers is asked for them.
    """
    if asked and not any(isinstance(part, Router) for part in walk(module)):
        raise InputError(
            "output_router_logits is True, and this model has no experts to choose from; call it "
            "without."
        )
    return asked


def prepared(
    cache: Cache, input_ids: Any, max_length: int, attention_mask: Any = None
) -> dict[str, Any]:
    """What the first call of a generation is given besides its ids, for `max_length` slots."""
    ids = array(input_ids)
    mask = fitting(ids.shape, "attention_mask", attention_mask)
    real = np.ones(ids.shape, bool) if mask is None else mask.astype(bool)
    rest = [(0, 0), (0, max_length - ids.shape[1])]
    return {
        "past_key_values": cache,
        "attention_mask": jnp.pad(jnp.asarray(real, jnp.int32), rest, constant_values=1),
        "position_ids": jnp.maximum(jnp.cumsum(jnp.asarray(real, jnp.int32), 1) - 1, 0),
    }


def updated(outputs: CausalOutput, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What the next call is given, which goes on by one token."""
    if not isinstance(outputs.past_key_values, Cache):
        raise CacheError(
            "These outputs hold no past_key_values; they come of a call without a cache. Start "
            "with prepare_inputs_for_generation."
        )
    following = {"position_ids": kwargs["position_ids"][:, -1:] + 1}
    return {**kwargs, "past_key_values": outputs.past_key_values, **following}
