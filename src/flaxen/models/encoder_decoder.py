"""The encoder-decoder skeleton: one sequence is read, another is said, token by token."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.cache import NewTokens
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.context import Context, Memory
from flaxen.layers.linear import Embedding
from flaxen.layers.relative_bias import RelativeBias
from flaxen.layers.runtime import Runtime
from flaxen.models.inputs import fitting, labels_of, token_ids
from flaxen.models.outputs import Seq2SeqStates
from flaxen.models.shift import Shift
from flaxen.models.skeleton import How, Skeleton
from flaxen.models.tower import Tower, encoder_context


@module
class EncoderDecoder(Tower, Skeleton):
    """Without a head: states of both sides. The fields of a tower are the decoder's."""

    embed_tokens: Embedding
    encoder: Any
    shift: static[Shift]

    answers: ClassVar[bool] = False
    targets: ClassVar[tuple[str, ...]] = ()

    def kind(self) -> str:
        return "an encoder-decoder without a head"

    def bare(self) -> bool:
        return not self.targets

    def takes(self) -> tuple[str, ...]:
        return (*self.encoder.inputs, "decoder_input_ids", "decoder_attention_mask", *self.targets)

    def ties(self) -> dict[str, str]:
        return self.encoder.ties()

    def example(self, shape: tuple[int, int]) -> dict[str, Any]:
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        return {self.encoder.inputs[0]: self.encoder.example(shape), "decoder_input_ids": ids}

    def call(self, how: How, **inputs: Any) -> Any:
        source, mask, ids, keep, labels = self.checked(inputs)
        return forward(
            self,
            source,
            mask,
            ids,
            keep,
            labels,
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        """The encoder's states."""
        if self.encoder.inputs[0] != "input_ids":
            raise InputError(f"This model reads {self.encoder.inputs[0]}, and no text.")
        return self.encoded(ids, self.reading(ids, mask.astype(bool), runtime, dropout_key))[0]

    def checked(self, inputs: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """The encoder's sequence and mask, the decoder's ids and mask, and labels.

        Raises:
            InputError: for inputs that do not fit, or where the decoder is given nothing.
        """
        source, mask = self.encoder.checked(self.embed_tokens, inputs)
        vocab, labels = self.embed_tokens.vocab_size, inputs.get("labels")
        ids = inputs.get("decoder_input_ids")
        if ids is None and labels is not None:
            labels = labels_of(labels, np.shape(labels), vocab)
            ids = self.shift(labels)
        elif ids is None:
            ids = self.shift.alone(source if source.ndim == 2 else None)
        if ids is None:
            given = " or ".join(("decoder_input_ids", *self.targets))
            raise InputError(f"The decoder is given nothing: pass {given}, or call generate.")
        ids = token_ids(ids, vocab)
        if len(ids) != len(source):
            raise InputError(f"{len(source)} rows are read and {len(ids)} said; give as many.")
        self.check_length("decoder_input_ids", ids.shape[1])
        keep = fitting(ids.shape, "decoder_attention_mask", inputs.get("decoder_attention_mask"))
        return source, mask, ids, keep, labels_of(labels, ids.shape, vocab)

    def encoded(
        self, source: jax.Array, ctx: Context, collect: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """What the encoder makes of its sequence: states (B, S, D), and all on the way."""
        with ctx.runtime.products():
            x = self.encoder.embedded(self.embed_tokens, source)
        x, _, states = self.encoder.climb(x, ctx, None, collect)
        return x, states

    def reading(
        self,
        source: jax.Array,
        keep: jax.Array | None,
        runtime: Runtime,
        dropout_key: jax.Array | None = None,
    ) -> Context:
        """What the encoder's layers look at."""
        length = source.shape[1] if source.ndim == 2 else self.encoder.length
        shape = len(source), length
        return encoder_context(self.encoder, shape, keep, runtime, dropout_key)

    def saying(
        self,
        scene: Scene,
        memory: Memory,
        runtime: Runtime,
        at: NewTokens | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Context:
        """What the decoder's layers look at, for queries and keys at slots (T,) and (S,)."""
        held = memory.states if at is None else at.valid
        assert held is not None
        rows = len(held)
        bias = self.position_bias
        assert not isinstance(bias, RelativeBias)
        return Context(
            positions=jnp.broadcast_to(scene.q_slots, (rows, len(scene.q_slots))),
            scene=scene,
            rotary=(),
            at=at,
            dropout_key=dropout_key,
            bias=None if bias is None else bias(scene.q_slots, scene.k_slots),
            memory=memory,
            runtime=runtime,
        )

    def said(
        self, ids: jax.Array, ctx: Context, caches: Any = None, collect: bool = False
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        """Ids (B, T) -> the decoder's states (B, T, D), caches, and all on the way."""
        return self.climb(self.embed_tokens(ids), ctx, caches, collect)

    def output(self, x: jax.Array, labels: Any, runtime: Runtime, sides: dict[str, Any]) -> Any:
        """The result, of the decoder's last states and what `sides` were asked for."""
        return Seq2SeqStates(last_hidden_state=x, **sides)


def whole(
    model: EncoderDecoder,
    source: jax.Array,
    mask: jax.Array | None,
    ids: jax.Array,
    keep: jax.Array | None,
    runtime: Runtime,
    dropout_key: jax.Array | None = None,
    collect: bool = False,
) -> tuple[jax.Array, dict[str, Any], tuple[Context, Context]]:
    """Both sides at once: the decoder's states, what is known of each side, and what each looked
    at.
    """
    keys = [None, None] if dropout_key is None else jax.random.split(dropout_key)
    mask, keep = (None if x is None else x.astype(bool) for x in (mask, keep))
    reading = model.reading(source, mask, runtime, keys[0])
    read, inner = model.encoded(source, reading, collect)
    memory = Memory(states=read, scene=crossing(ids.shape[1], read.shape[1], mask))
    slots = jnp.arange(ids.shape[1], dtype=jnp.int32)
    scene = Scene(q_slots=slots, k_slots=slots, keep=keep, aligned=True)
    saying = model.saying(scene, memory, runtime, dropout_key=keys[1])
    x, _, outer = model.said(ids, saying, None, collect)
    sides = {
        "encoder_last_hidden_state": read,
        "encoder_hidden_states": inner,
        "decoder_hidden_states": outer,
    }
    return x, sides, (reading, saying)


def crossing(queries: int, keys: int, keep: jax.Array | None) -> Scene:
    """Where the decoder's queries and the encoder's keys stand: each sees all that are real."""
    q, k = (jnp.arange(n, dtype=jnp.int32) for n in (queries, keys))
    return Scene(q_slots=q, k_slots=k, keep=keep)


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions"))
def forward(
    model: EncoderDecoder,
    source: jax.Array,
    mask: jax.Array | None,
    ids: jax.Array,
    keep: jax.Array | None,
    labels: jax.Array | None,
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
) -> Any:
    """Whole sequences of both sides -> the output, and its loss if there are labels."""
    collect = hidden_states or attentions
    x, sides, (reading, saying) = whole(
        model, source, mask, ids, keep, runtime, dropout_key, collect
    )
    inner, outer = sides["encoder_hidden_states"], sides["decoder_hidden_states"]
    if not hidden_states:
        sides |= {"encoder_hidden_states": None, "decoder_hidden_states": None}
    if attentions:
        pairs = model.attentions(outer, saying)
        sides["encoder_attentions"] = model.encoder.attentions(inner, reading)
        sides["decoder_attentions"], sides["cross_attentions"] = zip(*pairs, strict=True)
    return model.output(x, labels, runtime, sides)
