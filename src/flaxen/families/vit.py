"""ViT and DINOv2 (without and with registers): models of pictures alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.convert.relation import Join
from flaxen.core.errors import ConfigError
from flaxen.core.tree import module, ones_param, param, zeros_param
from flaxen.families.encoders import asked_head, norm
from flaxen.families.family import Family, family
from flaxen.families.towers import block, sizes
from flaxen.layers.block import Block
from flaxen.layers.context import Context
from flaxen.layers.linear import linear
from flaxen.layers.mlp import MLP, GatedMLP, gated_mlp, mlp
from flaxen.layers.norm import Identity, Scale
from flaxen.layers.patches import grid_positions, patches
from flaxen.layers.pooling import FirstAndMean, FirstSlot
from flaxen.models.classifiers import known_problem
from flaxen.models.heads import Bare, Head, Transform
from flaxen.models.vision import ImageEncoder, ImageHead, Tower

FAMILIES: dict[str, Family] = {}


def names(prefix: str) -> dict[str, Any]:
    return {
        "tower.class_token": f"{prefix}.embeddings.cls_token",
        "tower.registers": f"{prefix}.embeddings.register_tokens",
        "tower.mask_token": f"{prefix}.embeddings.mask_token",
        "tower.positions.weight": f"{prefix}.embeddings.position_embeddings",
        "tower.patches": f"{prefix}.embeddings.patch_embeddings.projection",
        "tower.layers": f"{prefix}.encoder.layer",
        "tower.norm": f"{prefix}.layernorm",
        "self_attn.q_proj": "attention.attention.query",
        "self_attn.k_proj": "attention.attention.key",
        "self_attn.v_proj": "attention.attention.value",
        "self_attn.o_proj": "attention.output.dense",
        "head.pooler.dense": f"{prefix}.pooler.dense",
        "head.out_proj": "classifier",
    }


VIT = names("vit") | {
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "input_layernorm": "layernorm_before",
    "pre_feedforward_layernorm": "layernorm_after",
}


def tower(c: Any, block: Any, way: str = "cubic", **slots: Any) -> Tower:
    """`slots` are other fields; way: how positions become those of other pictures."""
    image, patch, grid = sizes(c)
    width = c.hidden_size
    return Tower(
        patches=patches(width, c.num_channels, patch),
        class_token=param("1 1 embed", embed=width),
        positions=grid_positions(grid, width, 1, "1 positions embed", way),
        layers=[block(c, i) for i in range(c.num_hidden_layers)],
        norm=norm(c),
        image=image,
        dropout=float(c.hidden_dropout_prob),
        **slots,
    )


def attention_slots(c: Any) -> dict[str, Any]:
    return {
        "bias": bool(c.qkv_bias),
        "out_bias": True,
        "dropout": float(c.attention_probs_dropout_prob),
    }


def vit_block(c: Any, i: int) -> Block:
    network = mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)
    return block(c, i, network, float(c.hidden_dropout_prob), **attention_slots(c))


def pooled(c: Any) -> Head:
    dense = linear({"embed": c.hidden_size}, {"features": c.pooler_output_size}, bias=True)
    return Bare(pooler=Transform(dense=dense, act=c.pooler_act))


def labels(c: Any, pool: Any, width: int) -> Head:
    return ImageHead(
        pool=pool,
        out_proj=linear({"features": width}, {"labels": c.num_labels}, bias=True),
        problem=known_problem(c.get("problem_type")),
    )


def first(c: Any) -> Head:
    return labels(c, FirstSlot(), c.hidden_size)


# encoder_stride is of the head that paints pictures; the pooler's keys are of the model alone.
@family(FAMILIES, "vit", VIT, base_prefix="vit", spare=r"(vit\.)?pooler\.|classifier\.")
def vit(c: Any) -> ImageEncoder:
    heads = {"Model": pooled, "ForImageClassification": first}
    head = asked_head(c, "ViT", heads, ["encoder_stride", "pooler_act", "pooler_output_size"])
    return ImageEncoder(tower=tower(c, vit_block), head=head)


DINO = {
    "post_attention_layernorm.weight": "layer_scale1.lambda1",
    "post_feedforward_layernorm.weight": "layer_scale2.lambda1",
    "input_layernorm": "norm1",
    "pre_feedforward_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "mlp.gated.down_proj": "mlp.weights_out",
    "gate_up": Join("mlp.weights_in", "{mlp.gated.gate_proj: mlp | mlp.gated.up_proj: mlp} embed"),
}


@module
class Gated:
    """A gated network, which has other names in files than a plain one."""

    gated: GatedMLP

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self.gated(x, ctx)


def network(c: Any) -> MLP | Gated:
    width, inner = c.hidden_size, int(c.hidden_size * c.mlp_ratio)
    if not c.use_swiglu_ffn:
        return mlp(width, inner, c.hidden_act, bias=True)
    c.get("hidden_act")  # of plain networks alone
    return Gated(gated=gated_mlp(width, (inner * 2 // 3 + 7) // 8 * 8, "silu", bias=True))


def dino_block(c: Any, i: int) -> Block:
    scale = lambda: Scale(weight=ones_param(embed=c.hidden_size))
    made = block(c, i, network(c), **attention_slots(c))
    return dataclasses.replace(
        made, post_attention_layernorm=scale(), post_feedforward_layernorm=scale()
    )


BACKBONE = (
    "stage_names",
    "out_features",
    "out_indices",
    "apply_layernorm",
    "reshape_hidden_states",
)


def dino(c: Any, name: str, **slots: Any) -> ImageEncoder:
    """`slots` are of the tower.

    Raises:
        ConfigError: layers that are left out by chance, in training.
    """
    if c.drop_path_rate:
        raise ConfigError(
            f"drop_path_rate={c.drop_path_rate} leaves layers out at random while training, which "
            "is not supported. Set it to 0 to run or train without."
        )
    for key in BACKBONE:
        c.get(key)  # of the backbone class alone, which is refused by name
    c.get("layerscale_value")  # what fresh scales begin with
    seen = tower(c, dino_block, resizes=True, **slots)
    heads = {
        "Model": lambda c: Bare(pooler=Identity()),
        "ForImageClassification": lambda c: labels(
            c, FirstAndMean(leading=seen.leading), 2 * c.hidden_size
        ),
    }
    return ImageEncoder(tower=seen, head=asked_head(c, name, heads))


def mask_token(c: Any, layout: str = "1 embed") -> Any:
    return zeros_param(layout, embed=c.hidden_size)


@family(FAMILIES, "dinov2", names("dinov2") | DINO, base_prefix="dinov2", spare=r"classifier\.")
def dinov2(c: Any) -> ImageEncoder:
    return dino(c, "Dinov2", mask_token=mask_token(c) if c.use_mask_token else None)


@family(
    FAMILIES,
    "dinov2_with_registers",
    names("dinov2_with_registers") | DINO,
    base_prefix="dinov2_with_registers",
    spare=r"classifier\.",
)
def dinov2_with_registers(c: Any) -> ImageEncoder:
    count = {"positions": c.num_register_tokens, "embed": c.hidden_size}
    registers = param("1 positions embed", **count)
    parts = {"mask_token": mask_token(c), "registers": registers, "way": "antialiased"}
    return dino(c, "Dinov2WithRegisters", **parts)
