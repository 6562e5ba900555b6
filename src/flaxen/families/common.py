"""What most decoders share: each piece is a default that a family overrides by passing another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flaxen.attention import Mask
from flaxen.convert.ops import Chunk, SplitModulelist
from flaxen.convert.transforms import WeightConverter, WeightTransform
from flaxen.core.errors import ConfigError
from flaxen.layers.attention import Attention, attention
from flaxen.layers.block import Block
from flaxen.layers.linear import embedding, linear
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.norm import RMSNorm, rms_norm
from flaxen.layers.rope import Rope, layer_rope, rope
from flaxen.models.balance import RouterLoss
from flaxen.models.decoder import Decoder

LLAMA = {
    "layers": "model.layers",
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
}
"""Our names that differ from Llama's; q_norm and the like are whole pieces, so `norm` does not
touch them.
"""

MOE = LLAMA | {"experts": "experts.{experts}"}
"""One tensor for each expert."""


def packed(module: str, gate: str, up: str, down: str) -> tuple[WeightTransform, ...]:
    """From files in which one tensor holds a projection of all experts, gate above up."""
    one = lambda name: f"{module}.experts.*.{name}.weight"
    return (
        WeightConverter(
            "mlp.experts.gate_up_proj", [one(gate), one(up)], [Chunk(dim=1), SplitModulelist(dim=0)]
        ),
        WeightConverter("mlp.experts.down_proj", one(down), [SplitModulelist(dim=0)]),
    )


GROUPED = (
    "(kv_heads {self_attn.q_proj: group | self_attn.k_proj | self_attn.v_proj} head_dim) embed"
)
"""q, k and v in one tensor, each key head after the query heads that share it: with as many key
heads as query heads (GPT-NeoX, Bloom), with fewer, or with one for all (Falcon, StarCoder).
"""

SANDWICH = {k: v for k, v in LLAMA.items() if k != "pre_feedforward_layernorm"}
"""With norms before and after each sublayer, the checkpoint's names are ours."""


def head_dim(c: Any) -> int:
    return c.get("head_dim") or c.hidden_size // c.num_attention_heads


def rms(c: Any) -> RMSNorm:
    return rms_norm(c.rms_norm_eps, embed=c.hidden_size)


def head_rms(c: Any) -> RMSNorm:
    return rms_norm(c.rms_norm_eps, head_dim=head_dim(c))


def partly(c: Any, **more: Any) -> Rope:
    """The rope of all layers, in which a part of each head may turn."""
    return rope(c.rope_parameters, head_dim(c), c.max_position_embeddings, **more)


def rotary(c: Any, layer_type: str | None = None, **more: Any) -> Rope | None:
    """The rope of all layers, or of one kind of them; None where these do not rotate."""
    if layer_type is None:
        made = partly(c, **more)
    else:
        sizes = head_dim(c), c.max_position_embeddings
        made = layer_rope(c.rope_parameters, layer_type, *sizes, **more)
    if made is not None and made.dim != head_dim(c):
        raise ConfigError(
            f"partial_rotary_factor turns {made.dim} of {head_dim(c)} channels; this family turns "
            "all of them, so its numbers would be wrong. Remove the key if that is meant."
        )
    return made


def layer_mask(c: Any, i: int) -> Mask:
    """Sliding where the config's layer types say so."""
    types, window = c.get("layer_types"), c.get("sliding_window")
    sliding = types is not None and types[i] == "sliding_attention"
    return Mask(window=window or None if sliding else None)


def self_attn(c: Any, i: int, **slots: Any) -> Attention:
    given = {
        "embed": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.get("num_key_value_heads", c.num_attention_heads),
        "head_dim": head_dim(c),
        "bias": bool(c.get("attention_bias", False)),
        "rope": slots["rope"] if "rope" in slots else rotary(c),
        "mask": layer_mask(c, i),
        "dropout": float(c.get("attention_dropout", 0.0)),
    }
    return attention(**given | slots)


def mlp(c: Any, act: str = "hidden_act") -> GatedMLP:
    return gated_mlp(
        c.hidden_size, c.intermediate_size, getattr(c, act), bias=bool(c.get("mlp_bias", False))
    )


def dense(c: Any, i: int) -> GatedMLP:
    return mlp(c)


def block(
    c: Any,
    i: int,
    attn: Callable[[Any, int], Any] = self_attn,
    ffn: Callable[[Any, int], Any] = dense,
) -> Block:
    return Block(
        self_attn=attn(c, i),
        mlp=ffn(c, i),
        input_layernorm=rms(c),
        pre_feedforward_layernorm=rms(c),
        dropout=float(c.get("resid_pdrop", 0.0)),
    )


def decoder(
    c: Any,
    block: Callable[[Any, int], Any] = block,
    norm: Callable[[Any], Any] = rms,
    scale: float = 1.0,
    head_bias: bool = False,
    **slots: Any,
) -> Decoder:
    D, V, tied = {"embed": c.hidden_size}, {"vocab": c.vocab_size}, c.tie_word_embeddings
    given = {
        "embed_tokens": embedding(**V, **D, scale=scale, bias=head_bias and tied),
        "layers": [block(c, i) for i in range(c.num_hidden_layers)],
        "norm": norm(c),
        "lm_head": None if tied else linear(D, V, bias=head_bias),
    }
    return Decoder(**given | slots)


def with_attention(
    attn: Callable[[Any, int], Any], ffn: Callable[[Any, int], Any] = dense
) -> Callable[[Any, int], Block]:
    """Llama's block around another attention and feed-forward network."""
    return partial(block, attn=attn, ffn=ffn)


def balance(c: Any) -> RouterLoss:
    """The loss of routers that training adds if `output_router_logits` says so."""
    return RouterLoss(
        k=c.num_experts_per_tok,
        coef=float(c.get("router_aux_loss_coef", 0.0)),
        z_coef=float(c.get("router_z_loss_coef", 0.0)),
        asked=bool(c.get("output_router_logits", False)),
    )
