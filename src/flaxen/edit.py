"""What of a Model can be changed once it is there; every change gives a new Model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import is_leaf_type
from flaxen.core.errors import ConfigError, InputError, did_you_mean
from flaxen.core.tree import paths
from flaxen.layers.checkpointing import Checkpointing
from flaxen.layers.linear import Embedding, Linear
from flaxen.models.skeleton import only_generating
from flaxen.models.vocab import padded, resized


class Editable:
    """The editing methods of a Model, under Hugging Face's names.

    A `set_` method gives a new Model and leaves this one as it is. Weights that are not edited are
    the very same arrays.
    """

    def get_input_embeddings(self: Any) -> Embedding:
        """The table of token embeddings, weight (V, D)."""
        return self.module.embed_tokens

    def set_input_embeddings(self: Any, new: Any) -> Any:
        """With another weight (V, D) of the token embeddings: that of a part, or an array. A tied
        head follows.

        Raises:
            InputError: for another shape; `resize_token_embeddings` changes the number of tokens.
        """
        return self._with(embed_tokens=_with_weights(self.module.embed_tokens, new))

    def get_output_embeddings(self: Any) -> Linear:
        """The head, weight (V, D); a tied one has the weight of the token embeddings."""
        only_generating(self.module, "give output embeddings")
        head = self.module.lm_head
        return Linear(weight=self.module.embed_tokens.weight) if head is None else head

    def set_output_embeddings(self: Any, new: Any) -> Any:
        """With another weight of the head, and bias where it has one. A tied head stays tied, so
        that the token embeddings change too.

        Raises:
            InputError: for another shape.
        """
        only_generating(self.module, "take output embeddings")
        if self.module.lm_head is None:
            return self.set_input_embeddings(new)
        return self._with(lm_head=_with_weights(self.module.lm_head, new))

    def get_decoder(self: Any) -> Any:
        """All parts but the head."""
        only_generating(self.module, "give a decoder")
        return dataclasses.replace(self.module, lm_head=None)

    def set_decoder(self: Any, new: Any) -> Any:
        """With all parts but the head from another decoder of the same architecture.

        Raises:
            InputError: for another architecture, or layers that are folded in another way.
        """
        if type(new) is not type(self.module):
            raise InputError(
                f"The decoder is a {type(new).__name__}; expected a "
                f"{type(self.module).__name__}, as `get_decoder` gives it."
            )
        old, new = self.get_decoder(), dataclasses.replace(new, lm_head=None)
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise InputError(
                "The decoder is not built like this model's: its parts, their settings or the way "
                "its layers are folded differ. Load both alike (scan_layers), and change the "
                "architecture in the config."
            )
        return dataclasses.replace(
            self, module=dataclasses.replace(_placed(new, old), lm_head=self.module.lm_head)
        )

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
        seed: int = 0,
    ) -> Any:
        """With so many tokens, rounded up to a multiple: the first ones stay, new ones follow. The
        head and the config's `vocab_size` follow too.

        New rows are drawn around the mean of the old ones with a 1e-9th of their covariance, so
        that new tokens are about as likely as the average one; with mean_resizing=False around
        zero with the config's `initializer_range`. They depend on `seed` alone.

        Raises:
            InputError: for a number that is none.
            ConfigError: for packed weights, adapters and abstract models.
        """
        only_generating(self.module, "change its number of tokens")
        size = self.module.embed_tokens.vocab_size if new_num_tokens is None else new_num_tokens
        rows = _rounded(_count("new_num_tokens", size), pad_to_multiple_of)
        std = None
        if not mean_resizing:
            std = float(getattr(self.config, "initializer_range", None) or 0.02)
        module = resized(self.module, rows, self.runtime.placement, std=std, seed=seed)
        config = json.loads(self.origin.config_json) | {"vocab_size": rows}
        pad = config.get("pad_token_id")
        if isinstance(pad, int) and pad >= rows:
            # Transformers refuses to build a table that lacks the row of the padding.
            config["pad_token_id"] = None
        origin = dataclasses.replace(self.origin, config_json=json.dumps(config, sort_keys=True))
        return dataclasses.replace(self, module=module, origin=origin)

    def pad_vocab(self: Any, multiple: int | None = None) -> Any:
        """With zero rows in the embeddings and the head up to a multiple: by default of the devices
        that the plan cuts them over, so that it can.

        No token has these rows: their logits are -inf, they are in no loss and are never generated.
        The config stays, and saving leaves them out. `pad_vocab(1)` takes them away.
        """
        only_generating(self.module, "pad its number of tokens")
        if multiple is None:
            place = self.runtime.placement
            axes = dict(place.plan.weights).get("vocab", ()) if place else ()
            multiple = math.prod(place.mesh.shape.get(a, 1) for a in axes) if place else 1
        rows = _rounded(self.module.embed_tokens.vocab_size, multiple)
        module = padded(self.module, rows, self.runtime.placement)
        return dataclasses.replace(self, module=module)

    @property
    def is_gradient_checkpointing(self: Any) -> bool:
        return self.runtime.checkpointing.policy is not None

    def gradient_checkpointing_enable(
        self: Any, policy: str = "block", every_n_layers: int = 1
    ) -> Any:
        """Training this model computes every n-th layer again in the backward pass; `policy` says
        what is remembered, see `flaxen.layers.checkpointing.POLICIES`.
        """
        return self._checkpointing(Checkpointing(policy, every_n_layers))

    def gradient_checkpointing_disable(self: Any) -> Any:
        """Training this model remembers everything."""
        return self._checkpointing(Checkpointing())

    def activation_checkpointing_enable(
        self,
        kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> Any:
        """`gradient_checkpointing_enable` as Transformers 5 calls it. kwargs: `policy`;
        `use_reentrant` has no meaning here. offload: remember products in the memory of the host.

        Raises:
            ConfigError: other kwargs, or a device without such memory.
        """
        given = dict(kwargs or {})
        given.pop("use_reentrant", None)
        policy = given.pop("policy", "offload" if offload else "block")
        for name in given:
            near = did_you_mean(name, ["policy", "use_reentrant"])
            raise ConfigError(f"Unknown checkpointing argument {name!r}.{near}")
        return self.gradient_checkpointing_enable(policy, every_n_layers)

    def activation_checkpointing_disable(self: Any) -> Any:
        """Training this model remembers everything."""
        return self.gradient_checkpointing_disable()

    def _checkpointing(self: Any, how: Checkpointing) -> Any:
        return self.replace(runtime=dataclasses.replace(self.runtime, checkpointing=how))

    def _with(self: Any, **parts: Any) -> Any:
        return dataclasses.replace(self, module=dataclasses.replace(self.module, **parts))


def _with_weights(part: Any, new: Any) -> Any:
    """The part with the weights of another one, or with an array as its weight."""
    given = {"weight": getattr(new, "weight", new)}
    if getattr(part, "bias", None) is not None:
        given["bias"] = getattr(new, "bias", None)
    return _placed(dataclasses.replace(part, **given), part)


def _placed(new: Any, old: Any) -> Any:
    """`new`, with each weight on the devices of the one it stands for."""
    ours, theirs = paths(old, is_leaf_type), paths(new, is_leaf_type)
    for path, leaf in ours.items():
        given: Any = theirs.get(path)
        found = getattr(given, "shape", None)
        if found != leaf.shape:
            raise InputError(f"{path} has the shape {found}; expected {leaf.shape}.")
        if not is_leaf_type(given) and not jnp.issubdtype(given.dtype, jnp.floating):
            raise InputError(f"{path} is {given.dtype}; expected floats.")

    def place(leaf: Any, old: Any) -> Any:
        where = getattr(old, "sharding", None)
        if is_leaf_type(leaf):
            return leaf if where is None else jax.device_put(leaf, leaf.shardings(where))
        return jnp.asarray(leaf) if where is None else jax.device_put(leaf, where)

    return jax.tree.map(place, new, old, is_leaf=is_leaf_type)


def _rounded(size: int, multiple: int | None) -> int:
    return size if multiple is None else -(-size // _count("multiple", multiple)) * multiple


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; expected a whole number from 1 on.")
    return value
