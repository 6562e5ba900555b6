"""A causal language model that sees: what its vision model makes of pictures stands in the places
that some tokens keep for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flaxen.cache import Cache
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.checkpointing import cache_in_training
from flaxen.layers.context import Context
from flaxen.layers.runtime import Runtime
from flaxen.models import causal
from flaxen.models.causal_call import room_for
from flaxen.models.decoder import Decoder
from flaxen.models.grid_vision import positions_of
from flaxen.models.inputs import array, fitting, labels_of, only_new_tokens, token_ids
from flaxen.models.outputs import SeeingOutput
from flaxen.models.packed_vision import Pictures
from flaxen.models.sight import Sight
from flaxen.models.skeleton import How

KINDS = ("mm_token_type_ids", "token_type_ids")
"""Inputs that say which tokens keep places for pictures, which the ids say as well."""


@module
class VisionLanguage(Decoder):
    """vision: makes features of pictures; tokens: the ids that keep places for them, of each kind
    of pictures that the vision model knows; axes: how many positions a token has.
    """

    vision: Any
    tokens: static[tuple[int, ...]]
    axes: static[int] = 1

    def kind(self) -> str:
        return "a causal language model that sees"

    def takes(self) -> tuple[str, ...]:
        rows = ("input_ids", "attention_mask", "position_ids", "labels", "past_key_values")
        return (*rows, *KINDS, *self.pictured())

    def pictured(self) -> tuple[str, ...]:
        return self.vision.inputs

    def embedded(self, ids: jax.Array, ctx: Context, extra: jax.Array | None = None) -> jax.Array:
        """extra (B, T, D): what stands in the places of pictures."""
        x = super().embedded(ids, ctx)
        if extra is None:
            return x
        here = jnp.isin(ids, jnp.array(self.tokens))
        return jnp.where(here[..., None], extra.astype(x.dtype), x)

    def see(
        self,
        ids: Any,
        mask: Any,
        given: Mapping[str, Any],
        runtime: Runtime,
        counted: bool = True,
    ) -> tuple[Sight, int]:
        """The pictures of a text (B, T), and of how many tokens they are; mask (B, T) is 0 for
        padding; counted: with positions, where pictures have their own.

        Raises:
            InputError: pictures that the vision model cannot read, or that the text has not as many
            places for.
        """
        pictures: Pictures = self.vision.pictures(given)
        features = look(self.vision, pictures.arrays, runtime=runtime)
        which = places(ids, self.tokens, pictures.counts)
        sight = Sight(features=features, which=which)
        if self.axes > 1 and counted:
            if isinstance(ids, Tracer) or isinstance(mask, Tracer):
                raise InputError(
                    "The positions of pictures cannot be counted inside of a compiled function; "
                    "close over input_ids as an array, or pass position_ids."
                )
            real = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
            grids = dict(zip(self.tokens, pictures.grids, strict=True))
            positions, shift = positions_of(np.asarray(ids), real, grids)
            sight = dataclasses.replace(sight, positions=positions, shift=shift)
        return sight, sum(pictures.counts)

    def call(
        self,
        how: How,
        *,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        past_key_values: Any = None,
        mm_token_type_ids: Any = None,
        token_type_ids: Any = None,
        **given: Any,
    ) -> SeeingOutput:
        """Logits of token ids (B, T), among which are the places of the pictures. position_ids:
        (B, T), or (axes, B, T).
        """
        ids = token_ids(input_ids, self.embed_tokens.vocab_size)
        for name, kinds in zip(KINDS, (mm_token_type_ids, token_type_ids), strict=True):
            self._check_kinds(ids, name, fitting(ids.shape, name, kinds))
        training = how.train or labels is not None
        kept = cache_in_training(past_key_values, how.runtime.checkpointing, training, type(self))
        if kept is not None:
            only_new_tokens(
                labels=labels,
                output_attentions=how.attentions,
                output_hidden_states=how.hidden_states,
                train=how.train,
            )
            mask = room_for(self, kept, ids, attention_mask)
        else:
            mask = fitting(ids.shape, "attention_mask", attention_mask)
        positions = self._positions(ids, position_ids)
        sight, count = self._seen(ids, mask, given, positions, how)
        if kept is not None:
            out = self._continued(how, ids, kept, mask, positions, sight)
        else:
            out = self._whole(how, ids, mask, positions, sight, labels)
        seen = None if sight is None else sight.features[:count]
        shift = None if sight is None or sight.shift is None else jnp.asarray(sight.shift)[:, None]
        fields = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
        return SeeingOutput(**fields, image_hidden_states=seen, rope_deltas=shift)

    def _seen(
        self, ids: Any, mask: Any, given: Mapping[str, Any], positions: Any, how: How
    ) -> tuple[Sight | None, int]:
        if not given:
            return None, 0
        return self.see(ids, mask, given, how.runtime, counted=positions is None)

    def _whole(
        self, how: How, ids: Any, mask: Any, positions: Any, sight: Sight | None, labels: Any
    ) -> Any:
        mask, positions = _placed(ids, mask, positions, sight)
        return causal.forward(
            self,
            ids,
            mask,
            positions,
            None,
            labels_of(labels, ids.shape, self.embed_tokens.vocab_size),
            None if sight is None else sight.embedding(),
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def _continued(
        self, how: How, ids: Any, cache: Cache, valid: Any, positions: Any, sight: Sight | None
    ) -> Any:
        if positions is None and sight is not None and sight.positions is not None:
            positions = jnp.asarray(sight.positions) + cache.next_position[:, None]
        if sight is not None and isinstance(self, TogetherVisionLanguage):
            raise InputError(
                "This model's pictures are seen by later and earlier tokens of theirs at once, "
                "which a call with past_key_values cannot do; call generate."
            )
        extra = None if sight is None else sight.embedding()
        in_place = how.runtime.purpose == "serve"
        run = causal.forward_in_place if in_place else causal.forward_cached
        if sight is not None and sight.shift is not None:
            cache = cache.shifted(sight.shift)
        return run(self, ids, cache, valid, positions, extra, runtime=how.runtime)

    def loss_alone(
        self,
        how: How,
        *,
        input_ids: Any,
        labels: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        mm_token_type_ids: Any = None,
        token_type_ids: Any = None,
        **given: Any,
    ) -> jax.Array:
        """The loss of `call`, without its logits."""
        ids = token_ids(input_ids, self.embed_tokens.vocab_size)
        mask = fitting(ids.shape, "attention_mask", attention_mask)
        positions = self._positions(ids, position_ids)
        sight, _ = self._seen(ids, mask, given, positions, how)
        mask, positions = _placed(ids, mask, positions, sight)
        return causal.mean_loss(
            self,
            ids,
            labels_of(labels, ids.shape, self.embed_tokens.vocab_size),
            mask,
            positions,
            extra=None if sight is None else sight.embedding(),
            runtime=how.runtime,
        )

    def _positions(self, ids: Any, position_ids: Any) -> Any:
        if position_ids is None:
            return None
        positions = array(position_ids)
        if positions.ndim == 3 and self.axes > 1:
            return fitting((self.axes, *ids.shape), "position_ids", positions)
        return fitting(ids.shape, "position_ids", positions)

    def _check_kinds(self, ids: Any, name: str, kinds: Any) -> None:
        if kinds is None or isinstance(ids, Tracer) or isinstance(kinds, Tracer):
            return
        found = np.zeros(ids.shape, int)
        for n, token in enumerate(self.tokens):
            found[np.asarray(ids) == token] = n + 1
        if (found != np.asarray(kinds)).any():
            raise InputError(
                f"{name} says otherwise than input_ids which tokens keep places for "
                f"pictures: those are {', '.join(map(str, self.tokens))}. Leave it out."
            )


@module
class TogetherVisionLanguage(VisionLanguage):
    """Tokens of one picture see each other, later ones too: for layers of `TogetherAttention`."""

    def hidden(
        self,
        ids: jax.Array,
        ctx: Context,
        caches: Any = None,
        collect: bool = False,
        extra: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        if extra is not None:
            here = jnp.isin(ids, jnp.array(self.tokens))
            begins = here & ~jnp.pad(here, [(0, 0), (1, 0)])[:, :-1]
            picture = jnp.where(here, jnp.cumsum(begins, 1), 0)
            same = (picture[:, :, None] == picture[:, None, :]) & here[:, :, None]
            ctx = dataclasses.replace(ctx, bias=same[:, None])
        return super().hidden(ids, ctx, caches, collect, extra)


@partial(jax.jit, static_argnames="runtime")
def look(vision: Any, arrays: Any, *, runtime: Runtime) -> jax.Array:
    """Features of pictures, (N, D)."""
    return vision.features(arrays, runtime)


def _placed(ids: Any, mask: Any, positions: Any, sight: Sight | None) -> tuple[Any, Any]:
    """Mask and positions of a whole text."""
    if positions is None and sight is not None:
        positions = sight.positions
    if positions is not None and mask is None:
        # Without a mask, jumps of positions would tell documents apart.
        mask = np.ones(ids.shape, bool)
    return mask, positions


def places(ids: Any, tokens: tuple[int, ...], counts: tuple[int, ...]) -> Any:
    """Which feature stands in each slot, (B, T), -1 for none: those of each kind in a row.

    Raises:
        InputError: more places than features, or fewer.
    """
    which, first = -1, 0
    numpy = np if isinstance(ids, np.ndarray) else jnp
    for token, count in zip(tokens, counts, strict=True):
        here = ids == token
        if not isinstance(ids, Tracer) and int(here.sum()) != count:
            raise InputError(
                f"input_ids have {int(here.sum())} places for pictures (token {token}), and the "
                f"pictures are of {count} tokens. Use the processor of this model."
            )
        running = numpy.cumsum(here.reshape(-1)).reshape(ids.shape) - 1 + first
        which, first = numpy.where(here, running, which), first + count
    return which
