"""What most models that see share: each piece is a default that a family overrides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.tree import param
from flaxen.families.encoders import both_ways, norm
from flaxen.layers.block import Block
from flaxen.layers.mlp import mlp
from flaxen.layers.patches import Grid, grid_of, grid_positions, patches
from flaxen.layers.probe import FirstPatch, probe_pooler
from flaxen.models.vision import Tower


def pair(size: Any) -> Grid:
    """A size of a config, which may be one number for both sides."""
    rows, columns = size if isinstance(size, Iterable) else (size, size)
    return int(rows), int(columns)


def sizes(c: Any) -> tuple[Grid, Grid, Grid]:
    """Pixels of a picture, pixels of a patch, patches of a picture.

    Raises:
        ConfigError: a picture without a patch.
    """
    image, patch = pair(c.image_size), pair(c.patch_size)
    if min(patch) < 1 or min(grid_of(image, patch)) < 1:
        raise ConfigError(
            f"image_size={c.image_size} holds no patch of patch_size={c.patch_size}; expected one "
            "at least."
        )
    return image, patch, grid_of(image, patch)


def block(c: Any, i: int, mlp: Any, drop: float = 0.0, **slots: Any) -> Block:
    """A norm before each sublayer. drop: of what each adds; slots: of the attention."""
    return Block(
        self_attn=both_ways(c, **slots),
        mlp=mlp,
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=drop,
    )


def clip_block(c: Any, i: int, **slots: Any) -> Block:
    """A layer of CLIP, and of most that came after."""
    network = mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)
    return block(c, i, network, dropout=float(c.attention_dropout), **slots)


def clip_tower(c: Any, *, class_token: bool, bias: bool, **slots: Any) -> Tower:
    """CLIP's (with a class token, patches without bias) or SigLIP's (the other way round)."""
    image, patch, grid = sizes(c)
    width = c.hidden_size
    return Tower(
        patches=patches(width, c.num_channels, patch, bias=bias),
        class_token=param(embed=width) if class_token else None,
        positions=grid_positions(grid, width, int(class_token)),
        layers=[clip_block(c, i) for i in range(c.num_hidden_layers)],
        image=image,
        **slots,
    )


def clip_vision(c: Any) -> Tower:
    c.get("initializer_factor")
    c.get("projection_dim")  # of a head that the tower may have when it stands alone
    pooler = FirstPatch(norm=norm(c))
    return clip_tower(c, class_token=True, bias=False, pre_norm=norm(c), pooler=pooler)


def siglip_vision(c: Any) -> Tower:
    pooler = None
    if c.vision_use_head:
        network = mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)
        pooler = probe_pooler(c.hidden_size, c.num_attention_heads, norm(c), network)
    return clip_tower(c, class_token=False, bias=True, norm=norm(c), pooler=pooler)


CLIP_BLOCK = {
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "input_layernorm": "layer_norm1",
    "pre_feedforward_layernorm": "layer_norm2",
}

CLIP_TOWER = CLIP_BLOCK | {
    "patches": "embeddings.patch_embedding",
    "class_token": "embeddings.class_embedding",
    "positions": "embeddings.position_embedding",
    "pre_norm": "pre_layrnorm",
    "layers": "encoder.layers",
    "norm": "post_layernorm",
    "pooler.norm": "post_layernorm",
    "pooler": "head",
}
"""Of a tower that is under a name of its own."""
