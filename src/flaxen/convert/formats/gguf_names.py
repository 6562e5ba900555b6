"""GGUF tensors under the names, and in the layout, of the Hugging Face model."""

from __future__ import annotations

import re

from flaxen.convert.formats.gguf_blocks import PlusConstant
from flaxen.convert.lazy import LazyTensor

ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Frequencies that a model computes for itself.
_COMPUTED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_HUB_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")
_HUB_NAME = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)"
)
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hub_name(name: str, architecture: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if the architecture has no such tensor."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    layer = found["layer"]
    table = _TOP if layer is None else _GEMMA3_LAYER if architecture == "gemma3" else _LAYER
    part = table.get(found["part"])
    prefix = "" if layer is None else f"model.layers.{int(layer)}."
    return None if part is None else f"{prefix}{part}.{found['kind']}"


def gguf_name(name: str, architecture: str) -> str | None:
    """The GGUF name of a Hugging Face tensor; None if the architecture has no such tensor."""
    found = _HUB_NAME.fullmatch(name)
    if not found:
        return None
    layer = found["layer"]
    table = _TOP if layer is None else _GEMMA3_LAYER if architecture == "gemma3" else _LAYER
    part = {hub: own for own, hub in table.items()}.get(found["part"])
    prefix = "" if layer is None else f"blk.{int(layer)}."
    return None if part is None else f"{prefix}{part}.{found['kind']}"


def computed(name: str) -> bool:
    """Whether a tensor follows from the config, so that the other format leaves it out."""
    return bool(_COMPUTED.fullmatch(name) or _HUB_COMPUTED.fullmatch(name))


def hub_layout(
    name: str, tensor: LazyTensor, architecture: str, heads: int, kv_heads: int
) -> LazyTensor:
    """A tensor (by its Hugging Face name) as the Hugging Face model wants it."""
    if architecture == "llama" and ".q_proj." in name:
        return halves_apart(tensor, heads)
    if architecture == "llama" and ".k_proj." in name:
        return halves_apart(tensor, kv_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        # Stored with the 1 that the Hugging Face model adds as it runs.
        return PlusConstant(tensor, -1.0)
    return tensor


def halves_apart(tensor: LazyTensor, heads: int) -> LazyTensor:
    """Rows (heads half two) to (heads two half): from rotating neighbours to rotating halves."""
    rows, *rest = tensor.shape
    pairs = tensor.reshape((heads, rows // heads // 2, 2, *rest))
    return pairs.permute((0, 2, 1, *range(3, pairs.ndim))).reshape(tensor.shape)


def gguf_layout(
    name: str, tensor: LazyTensor, architecture: str, heads: int, kv_heads: int
) -> LazyTensor:
    """A tensor (by its Hugging Face name) as a GGUF file holds it: `hub_layout` undone."""
    if architecture == "llama" and ".q_proj." in name:
        return halves_together(tensor, heads)
    if architecture == "llama" and ".k_proj." in name:
        return halves_together(tensor, kv_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return PlusConstant(tensor.astype("float32"), 1.0)
    return tensor


def halves_together(tensor: LazyTensor, heads: int) -> LazyTensor:
    """Rows (heads two half) to (heads half two): from rotating halves to rotating neighbours."""
    rows, *rest = tensor.shape
    halves = tensor.reshape((heads, 2, rows // heads // 2, *rest))
    return halves.permute((0, 2, 1, *range(3, halves.ndim))).reshape(tensor.shape)
