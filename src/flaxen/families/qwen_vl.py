"""Qwen2-VL and Qwen2.5-VL: pictures of any size, and positions of three axes."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join, Under
from flaxen.convert.transforms import WeightRenaming
from flaxen.core.errors import ConfigError
from flaxen.families.common import LLAMA, decoder, head_dim, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.families.seeing import TEXT_KEYS, only_class, seeing
from flaxen.families.towers import pair
from flaxen.layers.attention import attention
from flaxen.layers.block import Block
from flaxen.layers.inner_dropout import as_kind
from flaxen.layers.linear import linear
from flaxen.layers.mergers import Merger
from flaxen.layers.mlp import gated_mlp, mlp
from flaxen.layers.norm import layer_norm, rms_norm
from flaxen.layers.patches import flat_patches
from flaxen.layers.rope import rope
from flaxen.models.decoder import Decoder
from flaxen.models.grid_vision import GridTower
from flaxen.models.packed_vision import AcrossWindows
from flaxen.models.vision_language import VisionLanguage

FAMILIES: dict[str, Family] = {}

VISUAL = {
    "patches": "patch_embed.proj",
    "layers": "blocks",
    "qkv": Join(
        "attn.qkv",
        "{self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim"
        " | self_attn.v_proj: kv_heads head_dim} embed",
    ),
    "self_attn.o_proj": "attn.proj",
    "input_layernorm": "norm1",
    "pre_feedforward_layernorm": "norm2",
    "merger.norm": "merger.ln_q",
    "merger.first": "merger.mlp.0",
    "merger.last": "merger.mlp.2",
}
PLAIN = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}

NEWER = (
    WeightRenaming(r"^model\.language_model\.", "model."),
    WeightRenaming(r"^model\.visual\.", "visual."),
)
"""The names that the classes of Transformers have had since."""

EPS = 1e-6
"""Of the norms of the vision model, whatever its config says."""


def text(c: Any) -> Decoder:
    """Qwen 2, which reads positions of three axes."""
    given = {"mrope_section": (16, 24, 24), **c.rope_parameters}
    turn = rope(given, head_dim(c), c.max_position_embeddings)
    if sum(given["mrope_section"]) != head_dim(c) // 2:
        raise ConfigError(
            f"mrope_section={given['mrope_section']} has {sum(given['mrope_section'])} pairs; a "
            f"head has {head_dim(c) // 2}."
        )
    attn = partial(self_attn, bias=True, out_bias=False, rope=turn)
    return decoder(c, with_attention(attn))


def attn(c: Any, width: int, *, whole: bool = False) -> Any:
    heads = c.num_heads
    turn = rope(c.rope_parameters, width // heads, 0)
    made = attention(
        embed=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        bias=True,
        mask=Mask(causal=False),
        rope=turn,
    )
    return as_kind(AcrossWindows, made) if whole else made


def merger(width: int, unit: int, out: int, norm: Any) -> Merger:
    inner = width * unit
    return Merger(
        norm=norm,
        first=linear({"features": inner}, {"mlp": inner}, bias=True),
        last=linear({"mlp": inner}, {"embed": out}, bias=True),
    )


def block_2(c: Any, i: int) -> Block:
    norm = lambda: layer_norm(EPS, embed=c.embed_dim)
    return Block(
        self_attn=attn(c, c.embed_dim),
        mlp=mlp(c.embed_dim, int(c.embed_dim * c.mlp_ratio), c.hidden_act, bias=True),
        input_layernorm=norm(),
        pre_feedforward_layernorm=norm(),
    )


def block_2_5(c: Any, i: int) -> Block:
    norm = lambda: rms_norm(EPS, embed=c.hidden_size)
    return Block(
        self_attn=attn(c, c.hidden_size, whole=i in c.fullatt_block_indexes),
        mlp=gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True),
        input_layernorm=norm(),
        pre_feedforward_layernorm=norm(),
    )


def tower(c: Any, width: int, out: int, block: Any, norm: Any, **slots: Any) -> GridTower:
    merge = c.spatial_merge_size
    size, frames = pair(c.patch_size), pair(c.temporal_patch_size)[0]
    return GridTower(
        patches=flat_patches(width, c.in_channels, size, frames),
        layers=[block(c, i) for i in range(c.depth)],
        merger=merger(width, merge**2, out, norm),
        merge=merge,
        **slots,
    )


def both(c: Any, vision: GridTower, name: str) -> VisionLanguage:
    only_class(c, f"{name}ForConditionalGeneration")
    for key in TEXT_KEYS:
        c.get(key)
    texts = c.inner("text_config", tie_word_embeddings=c.tie_word_embeddings)
    tokens = (c.image_token_id, c.video_token_id)
    return seeing(text(texts), vision, tokens, axes=3)


@family(FAMILIES, "qwen2_vl", LLAMA | {"vision": Under("visual", VISUAL | PLAIN)}, NEWER)
def qwen2_vl(c: Any) -> VisionLanguage:
    v = c.inner("vision_config")
    norm = layer_norm(EPS, embed=v.embed_dim)
    return both(c, tower(v, v.embed_dim, v.hidden_size, block_2, norm), "Qwen2VL")


@family(FAMILIES, "qwen2_5_vl", LLAMA | {"vision": Under("visual", VISUAL)}, NEWER)
def qwen2_5_vl(c: Any) -> VisionLanguage:
    v = c.inner("vision_config")
    side = v.window_size // v.spatial_merge_size // pair(v.patch_size)[0]
    windows = {"window": side, "second": float(v.tokens_per_second)}
    norm = rms_norm(EPS, embed=v.hidden_size)
    seen = tower(v, v.hidden_size, v.out_hidden_size, block_2_5, norm, **windows)
    return both(c, seen, "Qwen2_5_VL")
