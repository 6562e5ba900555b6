"""What the parts of a whole model offer: the one seam between `Model` and the kinds of models."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.errors import InputError
from flaxen.layers.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class How:
    """What a call is told besides its inputs: how it runs, and what it gives back.

    dropout_key is there only while training, and only where something is dropped.
    """

    runtime: Runtime
    train: bool = False
    dropout_key: jax.Array | None = None
    hidden_states: bool = False
    attentions: bool = False


class Skeleton:
    """The parts of a whole model.

    A kind of models is a class of these: it says what it is (`kind`), which inputs it takes
    (`takes`), and how it is called with them. `embed_tokens` is there in all, and None in those
    that read no text; `layers` is a field of it, or of the models inside it.
    """

    embed_tokens: Any
    layers: Any
    generates: ClassVar[bool] = False
    """Whether it goes on with a text, token by token."""
    answers: ClassVar[bool] = False
    """Whether it answers a sequence with a text of its own, token by token."""

    def kind(self) -> str:
        """What errors call it, with its article."""
        raise NotImplementedError

    def takes(self) -> tuple[str, ...]:
        """The names of its inputs; it needs the first, unless `needs` says otherwise."""
        raise NotImplementedError

    def needs(self) -> tuple[str, ...]:
        """The names of those inputs of which one at least has to be given."""
        return self.takes()[:1]

    def example(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Inputs that it can be called with, as shapes; shape: rows, and tokens of each."""
        return {"input_ids": jax.ShapeDtypeStruct(shape, jnp.int32)}

    def call(self, how: How, **inputs: Any) -> Any:
        """What it makes of inputs, of which every one is given and of a known name.

        Raises:
            InputError: for inputs that do not fit together, or lack.
        """
        raise NotImplementedError

    def pictured(self) -> tuple[str, ...]:
        """The names of those inputs that are of pictures, and go with a prompt."""
        return ()

    def loss_alone(self, how: How, **inputs: Any) -> jax.Array:
        """The loss of a call with labels, for which nothing else need be made."""
        return self.call(how, **inputs).loss

    def features(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        """Hidden states of token ids (B, T) after the last layer, (B, T, D); mask (B, T) is 0 for
        padding.
        """
        raise NotImplementedError

    def row_scores(
        self, ids: jax.Array, mask: jax.Array, runtime: Runtime, dropout_key: Any = None
    ) -> jax.Array:
        """Scores of the labels of each row, (B, L), of token ids (B, T); mask (B, T) is 0 for
        padding.
        """
        raise NotImplementedError

    def labels(self) -> int | None:
        """How many labels it scores for a row; None if it scores none."""
        return None

    def heads(self) -> tuple[str, ...]:
        """Parts that begin fresh with a task, and are trained in full beside adapters."""
        return ()

    def lacks(self) -> tuple[str, ...]:
        """Parts that other models of its family have in their files."""
        return ()

    def untied(self) -> Any:
        """The same with a head of its own in place of a tied one, as a description; None if only
        the config says which it is.
        """
        return None

    def bare(self) -> bool:
        """Whether it has no head, and its files the names of such a model."""
        return False

    def longest(self) -> int | None:
        """The most tokens of a row, if its weights set a limit."""
        return None

    def ties(self) -> dict[str, str]:
        """Weights that share another's parameter: path -> the path of that one."""
        return {}


def only_generating(module: Any, what: str) -> None:
    """
    Raises:
        InputError: for a model that cannot go on with a text, naming what it is.
    """
    if isinstance(module, Skeleton) and not module.generates:
        raise InputError(
            f"This model is {module.kind()}, which cannot {what}; a causal language model can. "
            f"Call it with {', '.join(module.takes())}."
        )


def only_taken(module: Skeleton, inputs: dict[str, Any]) -> dict[str, Any]:
    """Those inputs that are given.

    Raises:
        InputError: naming the ones that this kind of models does not take, or the one it needs.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    odd = [name for name in given if name not in module.takes()]
    if odd:
        raise InputError(
            f"This model is {module.kind()}, which does not take {', '.join(odd)}; it takes "
            f"{', '.join(module.takes())}."
        )
    needed = module.needs()
    if not given.keys() & set(needed):
        raise InputError(
            f"{' or '.join(needed)} is missing: what this model, {module.kind()}, is given first."
        )
    return given
