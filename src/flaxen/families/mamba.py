"""Mamba, Mamba 2 and Falcon Mamba: state spaces, without attention and feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flaxen.convert.relation import Join
from flaxen.convert.transforms import WeightRenaming
from flaxen.families.common import decoder
from flaxen.families.family import Family, family
from flaxen.layers.mamba import Mamba, mamba
from flaxen.layers.mixer_block import MixerBlock
from flaxen.layers.norm import RMSNorm, rms_norm
from flaxen.models.decoder import LayersOnly

FAMILIES: dict[str, Family] = {}


def joined(inside: str) -> dict[str, Join]:
    """Where a Mamba mixer called `inside` keeps its projections."""
    ours = inside
    return {
        "in": Join(f"{inside}.in_proj", f"{{{ours}.in_x: mlp | {ours}.in_z: mlp}} embed"),
        "x": Join(
            f"{inside}.x_proj", f"{{{ours}.x_dt: rank | {ours}.x_b: state | {ours}.x_c: state}} mlp"
        ),
    }


BACKBONE = {
    "layers": "backbone.layers",
    "embed_tokens": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "input_layernorm": "norm",
}

RENAMED = (WeightRenaming(r"^backbone\.embedding\.", "backbone.embeddings."),)
"""As the authors' own files call it."""


def norm(c: Any) -> RMSNorm:
    return rms_norm(c.layer_norm_epsilon, embed=c.hidden_size)


FRESH = (
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
)
"""Keys that speak of fresh weights only."""


def unused(c: Any, *more: str) -> None:
    """Keys that change no equation: `residual_in_fp32` says how 16-bit numbers are rounded, and
    others which program computes.
    """
    for key in (*FRESH, "residual_in_fp32", *more):
        c.get(key)


def mixer(c: Any, **norms: Any) -> Mamba:
    unused(c, "use_mambapy", "use_associative_scan", "expand")
    return mamba(
        embed=c.hidden_size,
        mlp=c.intermediate_size,
        state=c.state_size,
        rank=c.time_step_rank,
        kernel=c.conv_kernel,
        act=c.hidden_act,
        bias=c.use_bias,
        conv_bias=c.use_conv_bias,
        **norms,
    )


def block(c: Any, i: int) -> MixerBlock:
    return MixerBlock(mixer=mixer(c), input_layernorm=norm(c))


def backbone(c: Any, block: Callable[[Any, int], MixerBlock]) -> LayersOnly:
    return LayersOnly(**vars(decoder(c, block, norm)))


@family(FAMILIES, "mamba", BACKBONE | joined("mixer"), RENAMED, base_prefix="backbone")
def mamba1(c: Any) -> LayersOnly:
    return backbone(c, block)
