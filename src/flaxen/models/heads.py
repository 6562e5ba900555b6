"""What is made of the hidden states of an encoder."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.cross_entropy import IGNORED, linear_cross_entropy, only_tokens
from flaxen.layers.dropout import dropout
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.norm import Identity
from flaxen.models.inputs import array
from flaxen.models.losses import cross_entropy
from flaxen.models.outputs import EncoderOutput, LogitsOutput, PretrainingOutput
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class Last:
    """What a head is given: states (R, T, D) of the rows, which tokens are real (R, T), the table
    of embeddings (None in what reads no text), the shape (R,) that the rows were given in, the key
    of dropout, if any, the token ids (R, T) of a text, and where it is run.
    """

    states: jax.Array
    keep: jax.Array
    table: Any
    rows: tuple[int, ...]
    dropout_key: jax.Array | None = None
    ids: Any = None
    placement: Placement | None = None

    def drop(self, x: jax.Array, rate: float, place: int = 0) -> jax.Array:
        key = None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, place)
        return dropout(x, rate, key)


class Head:
    """`ids`: how many axes its token ids have; `targets`: the inputs that it learns from."""

    ids: ClassVar[int] = 2
    targets: ClassVar[tuple[str, ...]] = ("labels",)
    own_vectors: ClassVar[bool] = False
    """As of `Skeleton`; then it has `vectors`."""
    whole_rows: bool = False
    """Whether rows are of full length, and padding is read like words."""
    name: ClassVar[str]
    """What it is for, as errors say."""

    def __call__(self, last: Last) -> Any:
        """The output, without a loss."""
        raise NotImplementedError

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        """Of an output, where there are targets enough."""
        raise NotImplementedError

    def loss_alone(self, last: Last, targets: dict[str, jax.Array]) -> Any:
        """`loss` of what it is given, with as little else as it can."""
        return self.loss(self(last), targets)

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        """The targets as arrays, for token ids of this shape.

        Raises:
            InputError: another shape, or values out of range.
        """
        raise NotImplementedError

    def vectors(self, last: Last) -> jax.Array:
        """One for each row, (R, F), of length one."""
        raise NotImplementedError

    def labels(self) -> int | None:
        """As `Skeleton.labels`."""
        return None

    def ties(self) -> dict[str, str]:
        """As `Skeleton.ties`."""
        return {}


@module
class Transform:
    """norm(act(dense(x)))."""

    dense: Linear
    norm: Any = Identity()
    act: static[str]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(ACTIVATIONS[self.act](self.dense(x)))


@module
class Bare(Head):
    """None: the states themselves, and what the pooler makes of the first token's."""

    pooler: Any = None
    targets: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str] = ""

    def __call__(self, last: Last) -> EncoderOutput:
        pooled = None if self.pooler is None else self.pooler(last.states[:, 0])
        return EncoderOutput(last_hidden_state=last.states, pooler_output=pooled)

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> None:
        return None

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        return targets


@module
class MaskedLMHead(Head):
    """Scores of every token at every slot. decoder is None when tied to the embeddings; bias:
    (vocab,). unused: a bias that files of an untied head hold besides, for nothing.
    """

    transform: Any
    decoder: Linear | None = None
    bias: Any = None
    unused: Any = None
    name: ClassVar[str] = "masked language modeling"

    def __call__(self, last: Last) -> LogitsOutput:
        return LogitsOutput(logits=self.scores(last))

    def scores(self, last: Last) -> jax.Array:
        """(R, T, V)."""
        x = self.transform(last.states)
        table = last.table
        y = table.attend(x) if self.decoder is None else self.decoder(x)
        y = y if self.bias is None else y + self.bias.astype(y.dtype)
        return y if table.vocab is None else only_tokens(y, table.vocab)

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        return cross_entropy(out.logits, targets["labels"])

    def loss_alone(self, last: Last, targets: dict[str, jax.Array]) -> jax.Array:
        """The scores of all tokens are never held at once."""
        x, table = self.transform(last.states), last.table
        assert table is not None  # only what reads text has such a head
        head = table if self.decoder is None else self.decoder
        own = self.bias if self.decoder is None or self.bias is not None else self.decoder.bias
        total, count = linear_cross_entropy(
            x,
            head.weight,
            targets["labels"],
            bias=own,
            vocab=table.vocab,
            placement=last.placement,
        )
        return total / jnp.maximum(count, 1)

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        count = self.bias.shape[0] if self.bias is not None else None
        return {k: classes(k, x, shape, count) for k, x in targets.items()}

    def ties(self) -> dict[str, str]:
        if self.decoder is not None:
            return {}
        bias = {} if self.bias is None else {"head.decoder.bias": "head.bias"}
        return {"head.decoder.weight": "embed_tokens.weight"} | bias


@module
class PretrainingHead(MaskedLMHead):
    """BERT's: tokens, and whether the second text follows the first."""

    pooler: Transform
    seq_relationship: Linear
    targets: ClassVar[tuple[str, ...]] = ("labels", "next_sentence_label")
    name: ClassVar[str] = "pretraining"

    def __call__(self, last: Last) -> PretrainingOutput:  # type: ignore[override]
        follows = self.seq_relationship(self.pooler(last.states[:, 0]))
        return PretrainingOutput(
            prediction_logits=self.scores(last), seq_relationship_logits=follows
        )

    def loss_alone(self, last: Last, targets: dict[str, jax.Array]) -> Any:
        return self.loss(self(last), targets)

    def loss(self, out: Any, targets: dict[str, jax.Array]) -> jax.Array | None:
        if len(targets) < 2:
            return None
        follows = cross_entropy(out.seq_relationship_logits, targets["next_sentence_label"])
        return cross_entropy(out.prediction_logits, targets["labels"]) + follows

    def check(self, shape: tuple[int, ...], targets: dict[str, Any]) -> dict[str, Any]:
        shapes = {"labels": (shape, None), "next_sentence_label": (shape[:1], 2)}
        return {k: classes(k, x, *shapes[k]) for k, x in targets.items()}


def classes(name: str, labels: Any, shape: tuple[int, ...], count: int | None) -> Any:
    """Labels as an array of this shape, each below `count`.

    Raises:
        InputError: naming what is wrong.
    """
    labels = array(labels)
    if labels.shape != shape or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"{name} are {labels.dtype} of shape {labels.shape}; expected whole numbers of shape "
            f"{shape}."
        )
    if isinstance(labels, np.ndarray) and count is not None:
        bad = labels[(labels != IGNORED) & ((labels < 0) | (labels >= count))]
        if bad.size:
            raise InputError(
                f"{name} hold {bad[0]}; expected 0 to {count - 1}, or {IGNORED} for what does not "
                "count."
            )
    return labels
