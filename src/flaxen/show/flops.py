"""Floating-point operations of a model, counted from its parts: a multiplication and an addition
are two.

Counted are the products with weights, attention as far as its mask lets it see, short convolutions
and recurrences. What is small beside them (norms, activations, softmax, rotations) is not, and
neither is what a run computes twice, as with checkpointing: this is what MFU is defined by
(PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from flaxen.attention import Mask
from flaxen.core.checks import at_least, one_of
from flaxen.layers.attention import Attends
from flaxen.layers.conv import ShortConv
from flaxen.layers.delta import GatedDeltaNet
from flaxen.layers.lightning import LightningAttention
from flaxen.layers.linear import Linear
from flaxen.layers.mamba import Mamba
from flaxen.layers.mamba2 import Mamba2
from flaxen.layers.moe import MoE, Projections
from flaxen.layers.routers import Router
from flaxen.models.fold import Folded
from flaxen.tune.lora import LowRank

SEES = "vision"
"""The part of a model that looks at pictures, which a text does not pass through."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """Of one forward pass, by what is trained: `weights` are products with the model's own weights,
    `adapters` with low-rank ones, `mixing` what has no weight: attention and recurrences.
    """

    weights: float = 0.0
    adapters: float = 0.0
    mixing: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.weights + other.weights,
            self.adapters + other.adapters,
            self.mixing + other.mixing,
        )

    @property
    def forward(self) -> float:
        return self.weights + self.adapters + self.mixing

    def step(self, trained: str = "full") -> float:
        """Forward and backward pass: each product has two more, for the gradient of either side. A
        frozen weight has no gradient of its own.
        """
        own = 3 if trained == "full" else 2
        return own * self.weights + 3 * (self.adapters + self.mixing)


def model_flops(
    tree: Any,
    tokens_per_row: int,
    rows: int,
    *,
    training: bool = True,
    trained: str = "full",
) -> float:
    """Operations of one step on `rows` rows of `tokens_per_row` tokens, or of a forward pass.

    `tree` is a model of arrays, of shapes or an abstract one, folded or not. Of a mixture, only the
    experts that a token goes through count. trained: `full`, or `lora` where weights are frozen.
    Documents packed into one row are counted as if they saw each other.
    """
    one_of("trained", trained, ("full", "lora"))
    at_least("tokens_per_row", tokens_per_row, 1)
    at_least("rows", rows, 0)
    found = forward_flops(tree, rows * tokens_per_row, rows, tokens_per_row, tokens_per_row)
    return found.step(trained) if training else found.forward


def decode_flops(tree: Any, context: int, rows: int) -> float:
    """Operations of one more token in each row, the last of `context` tokens."""
    return forward_flops(tree, rows, rows, 1, context).forward


def forward_flops(tree: Any, tokens: int, rows: int, queries: int, keys: int) -> Flops:
    """Of `rows` rows whose last `queries` tokens of `keys` are computed: `tokens` in all."""
    total = Flops()
    for part, times, share in _parts(tree):
        total += _products(part, tokens * share)
        if isinstance(part, Attends):
            heads, _, k, v = part.sizes
            pairs = seen_pairs(part.mask, queries, keys)
            total += Flops(mixing=2.0 * times * rows * pairs * heads * (k + v))
        elif (state := _state(part)) is not None:
            total += Flops(mixing=float(times * tokens * state))
    return total + _tied_head(tree, tokens)


def seen_pairs(mask: Mask, queries: int, keys: int) -> int:
    """How many keys the last `queries` tokens of `keys` see, all together."""
    first = keys - queries
    if not mask.causal:
        span = keys if mask.window is None else min(keys, 2 * mask.window + 1)
        if span == keys:
            return queries * keys
        reach = mask.window or 0
        return sum(min(i, reach) + min(keys - 1 - i, reach) + 1 for i in range(first, keys))
    if mask.chunk is not None:
        return _chunked(mask.chunk, keys) - _chunked(mask.chunk, first)
    window = keys if mask.window is None else min(mask.window, keys)
    return _windowed(window, keys) - _windowed(window, first)


def _windowed(window: int, tokens: int) -> int:
    """Keys that the first `tokens` tokens see, each at most `window`: 1 + 2 + ... + w + w + ..."""
    rising = min(window, tokens)
    return rising * (rising + 1) // 2 + (tokens - rising) * window


def _chunked(chunk: int, tokens: int) -> int:
    whole, rest = divmod(tokens, chunk)
    return whole * chunk * (chunk + 1) // 2 + rest * (rest + 1) // 2


def _parts(node: Any, times: int = 1, share: float = 1.0) -> Iterator[tuple[Any, int, float]]:
    """Every part, for how many layers it stands, and the share of tokens that passes each of its
    weights. A stacked weight's shape counts its layers already.
    """
    if isinstance(node, list | tuple):
        for each in node:
            yield from _parts(each, times, share)
    elif isinstance(node, Folded):
        yield from _parts([node.head, node.tail], times, share)
        yield from _parts(node.body, node.count, share)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield node, times, share
        for field in dataclasses.fields(node):
            if field.name == SEES:
                continue
            inner = share
            if isinstance(node, MoE) and field.name == "experts":
                inner = share * node.gate.k / _experts(node)
            yield from _parts(getattr(node, field.name), times, inner)


def _experts(mixture: MoE) -> int:
    return mixture.gate.weight.shape[-2]


def _products(part: Any, tokens: float) -> Flops:
    """Of each weight that `tokens` tokens are multiplied with."""
    if not isinstance(part, Linear | Router | ShortConv | Projections):
        return Flops()
    weight = part.weight
    if isinstance(weight, LowRank):
        low = math.prod(weight.a.shape) + math.prod(weight.b.shape)
        return Flops(2.0 * tokens * math.prod(weight.shape), 2.0 * tokens * low)
    return Flops(2.0 * tokens * math.prod(weight.shape))


def _tied_head(tree: Any, tokens: int) -> Flops:
    """Scores by the table of embeddings, where there is no head."""
    tied = hasattr(tree, "lm_head") and tree.lm_head is None
    table = getattr(tree, "embed_tokens", None)
    return Flops(2.0 * tokens * math.prod(table.weight.shape)) if tied and table else Flops()


def _state(part: Any) -> int | None:
    """Operations a token and layer costs in a recurrence, in its step-by-step form.

    Each number of the state fades, is added to and is read: 1 + 2 + 2; the delta rule first reads
    what stands under the key: 2 more.
    """
    if isinstance(part, Mamba):
        return 5 * math.prod(part.A_log.shape[-2:])
    if isinstance(part, Mamba2):
        return 5 * math.prod(part.in_x.weight.shape[-3:-1]) * part.in_b.weight.shape[-2]
    if isinstance(part, LightningAttention):
        heads, head_dim = part.v.weight.shape[-3:-1]
        return 5 * heads * head_dim * head_dim
    if isinstance(part, GatedDeltaNet):
        return 7 * math.prod(part.in_v.weight.shape[-4:-1]) * part.in_k.weight.shape[-2]
    return None
