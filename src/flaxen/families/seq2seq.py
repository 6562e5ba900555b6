"""What most encoder-decoders share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.layers.attention import Attention, attention
from flaxen.layers.block import Block
from flaxen.layers.cross_attention import CrossAttention, cross_attention
from flaxen.layers.cross_block import CrossBlock, PostNormCrossBlock
from flaxen.layers.inner_dropout import DroppingMLP, as_kind
from flaxen.layers.linear import Embedding, embedding
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.layers.post_norm import PostNormBlock
from flaxen.models.encoder_decoder import EncoderDecoder
from flaxen.models.seq2seq import Seq2Seq
from flaxen.models.shift import Shift

SIDES = ("encoder", "decoder")

NAMES = {
    "embed_tokens": "model.shared",
    "encoder.embed_tokens": "model.encoder.embed_tokens",
    "decoder.embed_tokens": "model.decoder.embed_tokens",
    "encoder": "model.encoder",
    "encoder.layers": "model.encoder.layers",
    "layers": "model.decoder.layers",
    "embed_positions": "model.decoder.embed_positions",
    "encoder.embed_positions": "model.encoder.embed_positions",
    "embed_norm": "model.decoder.layernorm_embedding",
    "encoder.embed_norm": "model.encoder.layernorm_embedding",
    "norm": "model.decoder.layer_norm",
    "encoder.norm": "model.encoder.layer_norm",
    "logits_bias": "final_logits_bias",
    "o_proj": "out_proj",
    "cross_attn": "encoder_attn",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "input_layernorm": "self_attn_layer_norm",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
    "pre_feedforward_layernorm": "final_layer_norm",
    "post_attention_layernorm": "self_attn_layer_norm",
    "post_cross_attention_layernorm": "encoder_attn_layer_norm",
    "post_feedforward_layernorm": "final_layer_norm",
}
"""Of BART and those after it."""


def norm(c: Any) -> LayerNorm:
    """PyTorch's default epsilon: no key says another."""
    return layer_norm(1e-5, embed=c.d_model)


def table(c: Any) -> Embedding:
    return embedding(c.vocab_size, c.d_model, math.sqrt(c.d_model) if c.scale_embedding else 1.0)


def attn(c: Any, side: str, make: Callable[..., Any] = attention, **slots: Any) -> Any:
    """Attention of equal heads that share the width of the stream.

    Raises:
        ConfigError: when they do not share it evenly.
    """
    width, heads = c.d_model, getattr(c, f"{side}_attention_heads")
    if width % heads:
        raise ConfigError(
            f"d_model={width} does not divide by {side}_attention_heads={heads}; expected heads of "
            "equal size."
        )
    sizes = {"embed": width, "heads": heads, "kv_heads": heads, "head_dim": width // heads}
    return make(**sizes, **{"bias": True, "dropout": float(c.attention_dropout)} | slots)


def seeing(c: Any, side: str) -> Attention:
    """Of an encoder all tokens, of a decoder the past."""
    return attn(c, side, mask=Mask(causal=side == "decoder"))


def crossing(c: Any) -> CrossAttention:
    return attn(c, "decoder", cross_attention)


def ffn(c: Any, side: str) -> DroppingMLP:
    plain = mlp(c.d_model, getattr(c, f"{side}_ffn_dim"), c.activation_function, bias=True)
    return as_kind(DroppingMLP, plain, dropout=float(c.activation_dropout))


def post_norm_encoder_block(c: Any) -> PostNormBlock:
    rate = float(c.dropout)
    return PostNormBlock(
        self_attn=seeing(c, "encoder"),
        mlp=ffn(c, "encoder"),
        post_attention_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
        attn_dropout=rate,
        mlp_dropout=rate,
    )


def post_norm_decoder_block(c: Any) -> PostNormCrossBlock:
    return PostNormCrossBlock(
        self_attn=seeing(c, "decoder"),
        cross_attn=crossing(c),
        mlp=ffn(c, "decoder"),
        post_attention_layernorm=norm(c),
        post_cross_attention_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
        dropout=float(c.dropout),
    )


def encoder_block(c: Any, see: Callable[[Any, str], Any] = seeing) -> Block:
    return Block(
        self_attn=see(c, "encoder"),
        mlp=ffn(c, "encoder"),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=float(c.dropout),
    )


def decoder_block(
    c: Any,
    see: Callable[[Any, str], Any] = seeing,
    cross: Callable[[Any], Any] = crossing,
) -> CrossBlock:
    return CrossBlock(
        self_attn=see(c, "decoder"),
        cross_attn=cross(c),
        mlp=ffn(c, "decoder"),
        input_layernorm=norm(c),
        cross_attention_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=float(c.dropout),
    )


def layers(c: Any, side: str, block: Callable[[Any], Any]) -> list[Any]:
    c.get(f"{side}_layerdrop")  # leaves whole layers out in training only; here none are
    return [block(c) for _ in range(getattr(c, f"{side}_layers"))]


def shifted(c: Any, kind: type[Shift] = Shift) -> Shift:
    for key in ("forced_bos_token_id", "forced_eos_token_id"):
        c.get(key)  # read when it generates
    return kind(c.get("decoder_start_token_id"), c.get("pad_token_id"))


def asked(
    c: Any,
    prefix: str,
    head: Callable[[], dict[str, Any]],
    ending: str = "ForConditionalGeneration",
    older: Sequence[str] = (),
) -> Callable[..., EncoderDecoder]:
    """What `architectures` names: the model without a head, or with what `head()` makes, whose name
    has this ending, or one of the `older`; without any, the one with.

    Raises:
        ConfigError: for a head that this family does not have.
    """
    full = [f"{prefix}{name}" for name in (ending, *older)]
    name = next(iter(c.get("architectures") or ()), full[0])
    if name == f"{prefix}Model":
        return EncoderDecoder
    if name not in full:
        known = ", ".join((f"{prefix}Model", *full))
        raise ConfigError(f"architectures says {name!r}; expected one of {known}.")
    return lambda **parts: Seq2Seq(**parts, **head())


def alone(c: Any, prefix: str) -> bool:
    """Whether a config asks for the encoder alone; keys of the other side then mean nothing."""
    if c.get("architectures") != [f"{prefix}EncoderModel"]:
        return False
    for key in ("num_decoder_layers", "scale_decoder_outputs"):
        c.get(key)
    shifted(c)
    return True
