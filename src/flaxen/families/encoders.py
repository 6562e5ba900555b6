"""What most encoders share: each piece is a default that a family overrides by passing another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.core.tree import param, zeros_param
from flaxen.layers.attention import Attention, attention
from flaxen.layers.linear import Embedding, Linear, embedding, linear, position_table
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import Identity, LayerNorm, layer_norm
from flaxen.layers.pooling import FirstSlot
from flaxen.layers.post_norm import PostNormBlock
from flaxen.models.classifiers import ChoiceHead, SequenceHead, SpanHead, TokenHead, known_problem
from flaxen.models.encoder import Encoder
from flaxen.models.heads import Bare, Head, MaskedLMHead, Transform

Make = Callable[[Any], Any]
Heads = dict[str, Callable[[Any], Head]]


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, embed=c.hidden_size)


def dense(c: Any, act: str, over: Any = None, *, bias: bool = True) -> Transform:
    """over(act(dense(x))), as wide as the stream."""
    width = c.hidden_size
    product = linear({"embed": width}, {"features": width}, bias=bias)
    return Transform(dense=product, norm=over or Identity(), act=act)


def feature_norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, features=c.hidden_size)


def to_labels(c: Any, axis: str = "embed", count: int | None = None) -> Linear:
    labels = c.num_labels if count is None else count
    return linear({axis: c.hidden_size}, {"labels": labels}, bias=True)


def both_ways(c: Any, **slots: Any) -> Attention:
    """Attention of equal heads that sees both ways. `head_dim` among the slots is their size;
    without it they share the width of the stream.

    Raises:
        ConfigError: heads that do not share the width of the stream evenly.
    """
    width, heads = c.hidden_size, c.num_attention_heads
    if width % heads and "head_dim" not in slots:
        raise ConfigError(
            f"hidden_size={width} does not divide by num_attention_heads={heads}; expected heads "
            "of equal size."
        )
    given = {"bias": True, "mask": Mask(causal=False), "head_dim": width // heads} | slots
    return attention(embed=width, heads=heads, kv_heads=heads, **given)


def self_attn(c: Any, i: int) -> Attention:
    return both_ways(c, dropout=float(c.attention_probs_dropout_prob))


def block(c: Any, i: int, attn: Callable[[Any, int], Any] = self_attn) -> PostNormBlock:
    rate = float(c.hidden_dropout_prob)
    return PostNormBlock(
        self_attn=attn(c, i),
        mlp=mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True),
        post_attention_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
        attn_dropout=rate,
        mlp_dropout=rate,
    )


def types(c: Any) -> Embedding:
    return Embedding(weight=param(types=c.type_vocab_size, embed=c.hidden_size))


def encoder(c: Any, head: Head, block: Callable[[Any, int], Any] = block, **slots: Any) -> Encoder:
    """Learned positions and a norm over the embeddings; `slots` are other fields.

    Raises:
        ConfigError: for a model that is to see the past only, or positions of another kind.
    """
    if c.get("is_decoder", False):
        raise ConfigError(
            "is_decoder=True makes a causal model of this encoder; only encoders are handled here. "
            "Set it to false if that is meant."
        )
    positions = c.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ConfigError(
            f"position_embedding_type is {positions!r}; expected 'absolute'. Transformers 5 has no "
            "other one either: its numbers would be wrong."
        )
    parts: dict[str, Any] = {"embed_norm": norm(c)} if "embed_norm" not in slots else {}
    if "embed_positions" not in slots:
        parts["embed_positions"] = position_table(c.max_position_embeddings, c.hidden_size)
    if "dropout" not in slots:
        parts["dropout"] = float(c.hidden_dropout_prob)
    if "pad" not in slots:
        parts["pad"] = c.get("pad_token_id")
    return Encoder(
        embed_tokens=embedding(c.vocab_size, c.hidden_size),
        layers=[block(c, i) for i in range(c.num_hidden_layers)],
        head=head,
        **parts,
        **slots,
    )


def classifier_dropout(c: Any) -> float:
    return float(c.get("classifier_dropout", c.hidden_dropout_prob))


def pooler(c: Any) -> Transform:
    return dense(c, "tanh")


def sequence(
    c: Any, hidden: Any, dropout: float, pool: Any = None, input_dropout: float = 0.0
) -> Head:
    """Labels of rows, from what `hidden` makes of the first slot."""
    return SequenceHead(
        pool=pool or FirstSlot(),
        hidden=hidden,
        out_proj=to_labels(c, "features"),
        problem=known_problem(c.get("problem_type")),
        input_dropout=input_dropout,
        dropout=dropout,
    )


def choices(c: Any, pooler: Any, dropout: float, pool: Any = None) -> Head:
    one = to_labels(c, "features", 1)
    return ChoiceHead(pool=pool or FirstSlot(), pooler=pooler, choice=one, dropout=dropout)


def tokens(c: Any, dropout: float, transform: Transform | None = None) -> Head:
    labels = to_labels(c, "features" if transform else "embed")
    return TokenHead(transform=transform or Identity(), classifier=labels, dropout=dropout)


def span(c: Any, dropout: float = 0.0, transform: Transform | None = None) -> Head:
    """
    Raises:
        ConfigError: for another number of labels than two ends have.
    """
    if c.num_labels != 2:
        raise ConfigError(f"Question answering has 2 labels; the config has {c.num_labels}.")
    ends = to_labels(c, "features" if transform else "embed")
    return SpanHead(transform=transform or Identity(), qa_outputs=ends, dropout=dropout)


def masked(c: Any, act: str | None = None) -> dict[str, Any]:
    """The fields of a head for masked language modeling; an untied one has two biases in files."""
    vocab = c.vocab_size
    tied = c.tie_word_embeddings
    decoder = linear({"features": c.hidden_size}, {"vocab": vocab}, bias=True)
    return {
        "transform": dense(c, act or c.hidden_act, feature_norm(c)),
        "decoder": None if tied else decoder,
        "bias": zeros_param(vocab=vocab) if tied else None,
        "unused": None if tied else zeros_param(vocab=vocab),
    }


def masked_lm(c: Any) -> Head:
    return MaskedLMHead(**masked(c))


def masked_lm_gelu(c: Any) -> Head:
    """RoBERTa's, whatever the activation of the layers."""
    return MaskedLMHead(**masked(c, "gelu"))


def of_pooled(c: Any) -> Head:
    return sequence(c, pooler(c), classifier_dropout(c))


def of_first(c: Any) -> Head:
    """A layer of the head's own between the first token and the labels."""
    rate = classifier_dropout(c)
    return sequence(c, dense(c, "tanh"), rate, input_dropout=rate)


HEADS: Heads = {
    "Model": lambda c: Bare(pooler=pooler(c)),
    "ForMaskedLM": masked_lm,
    "ForSequenceClassification": of_pooled,
    "ForMultipleChoice": lambda c: choices(c, pooler(c), classifier_dropout(c)),
    "ForTokenClassification": lambda c: tokens(c, classifier_dropout(c)),
    "ForQuestionAnswering": span,
}


def asked_head(c: Any, prefix: str, heads: Heads, others: Sequence[str] = ()) -> Head:
    """The head that `architectures` names; without any, none. `others`: keys that only heads read,
    and that change nothing for the rest.

    Raises:
        ConfigError: for a head that this family does not have.
    """
    for key in ("tie_word_embeddings", *others):
        c.get(key)
    name = next(iter(c.get("architectures") or ()), f"{prefix}Model")
    if not name.startswith(prefix) or name.removeprefix(prefix) not in heads:
        known = ", ".join(f"{prefix}{ending}" for ending in heads)
        raise ConfigError(f"architectures says {name!r}; expected one of {known}.")
    return heads[name.removeprefix(prefix)](c)
