"""Mamba, Mamba 2 and Falcon Mamba: state spaces, without attention and feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flaxen.convert.relation import Join
from flaxen.convert.transforms import WeightRenaming
from flaxen.families.common import decoder
from flaxen.families.family import Family, family
from flaxen.layers.around import PlainRMSNorm
from flaxen.layers.gated_norm import gate_then_norm
from flaxen.layers.mamba import Mamba, mamba
from flaxen.layers.mamba2 import Mamba2, mamba2
from flaxen.layers.mixer_block import MixerBlock
from flaxen.layers.norm import RMSNorm, rms_norm
from flaxen.models.decoder import LayersOnly

FAMILIES: dict[str, Family] = {}


def joined(ours: str, theirs: str) -> dict[str, Join]:
    """Where the file keeps the projections of a Mamba mixer, called `theirs` there."""
    return {
        "in": Join(f"{theirs}.in_proj", f"{{{ours}.in_x: mlp | {ours}.in_z: mlp}} embed"),
        "x": Join(
            f"{theirs}.x_proj", f"{{{ours}.x_dt: rank | {ours}.x_b: state | {ours}.x_c: state}} mlp"
        ),
    }


def joined2(ours: str, theirs: str) -> dict[str, Join]:
    """The same of a Mamba 2 mixer."""
    of = lambda kind: (
        f"{ours}.{kind}_x: heads head_dim | {ours}.{kind}_b: kv_heads state"
        f" | {ours}.{kind}_c: kv_heads state"
    )
    inner = f"{ours}.in_z: heads head_dim | {of('in')} | {ours}.in_dt: heads"
    return {
        "in": Join(f"{theirs}.in_proj", f"{{{inner}}} embed"),
        "conv": Join(f"{theirs}.conv1d", f"{{{of('conv')}}} 1 kernel"),
    }


BACKBONE = {
    "layers": "backbone.layers",
    "embed_tokens": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "input_layernorm": "norm",
    "gate_norm": "norm",
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


@family(FAMILIES, "mamba", BACKBONE | joined("mixer", "mixer"), RENAMED, base_prefix="backbone")
def mamba1(c: Any) -> LayersOnly:
    return backbone(c, block)


def mixer2(c: Any) -> Mamba2:
    # How long its pieces are, and a rank that nothing has.
    unused(c, "chunk_size", "time_step_rank", "expand")
    return mamba2(
        gate_then_norm(c.layer_norm_epsilon, c.num_heads, c.head_dim, c.n_groups),
        embed=c.hidden_size,
        groups=c.n_groups,
        state=c.state_size,
        kernel=c.conv_kernel,
        act=c.hidden_act,
        bias=c.use_bias,
        conv_bias=c.use_conv_bias,
        limit=tuple(float(x) for x in c.time_step_limit),
    )


def block2(c: Any, i: int) -> MixerBlock:
    return MixerBlock(mixer=mixer2(c), input_layernorm=norm(c))


@family(FAMILIES, "mamba2", BACKBONE | joined2("mixer", "mixer"), RENAMED, base_prefix="backbone")
def mamba_2(c: Any) -> LayersOnly:
    return backbone(c, block2)


def falcon_block(c: Any, i: int) -> MixerBlock:
    norms = {name: PlainRMSNorm(eps=c.mixer_rms_eps) for name in ("dt_norm", "b_norm", "c_norm")}
    return MixerBlock(mixer=mixer(c, **norms), input_layernorm=norm(c))


@family(FAMILIES, "falcon_mamba", BACKBONE | joined("mixer", "mixer"), base_prefix="backbone")
def falcon_mamba(c: Any) -> LayersOnly:
    return backbone(c, falcon_block)
