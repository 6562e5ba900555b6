"""Tiny GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, HEAD_DIM = 32, 4, 2, 48, 7, 8
PLAIN = gguf.GGMLQuantizationType
HALVES = {  # where a block keeps its half-precision scales
    PLAIN.Q4_0: (0,),
    PLAIN.Q4_1: (0, 2),
    PLAIN.Q5_0: (0,),
    PLAIN.Q5_1: (0, 2),
    PLAIN.Q8_0: (0,),
    PLAIN.Q2_K: (80, 82),
    PLAIN.Q3_K: (108,),
    PLAIN.Q4_K: (0, 2),
    PLAIN.Q5_K: (0, 2),
    PLAIN.Q6_K: (208,),
    PLAIN.IQ2_XXS: (0,),
    PLAIN.IQ2_XS: (0,),
    PLAIN.IQ2_S: (0,),
    PLAIN.IQ3_XXS: (0,),
    PLAIN.IQ3_S: (0,),
    PLAIN.IQ1_S: (0,),
    PLAIN.IQ1_M: (),
    PLAIN.IQ4_NL: (0,),
    PLAIN.IQ4_XS: (0,),
    PLAIN.TQ1_0: (52,),
    PLAIN.TQ2_0: (64,),
    PLAIN.MXFP4: (),
    PLAIN.NVFP4: (),
}
# Bits of a byte that keep a scale which is no half, or lies in pieces, from being infinite.
FINITE = {PLAIN.IQ1_M: (55, 0x3F), PLAIN.MXFP4: (0, 0x7F)}


def write(
    path: Path,
    arch: str,
    tensors: dict | None = None,
    extra=lambda writer: None,
    embedding: bool = True,
) -> Path:
    """A tiny GGUF file; a tensor is an array, or (bytes, type)."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    extra(writer)
    base = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)} if embedding else {}
    for name, value in (base | (tensors or {})).items():
        raw, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: gguf.GGMLQuantizationType, *shape: int) -> np.ndarray:
    """Random stored bytes of a type, with finite scales."""
    rng = np.random.default_rng(int(kind))
    per, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // per, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(size=(*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    if kind in FINITE:
        at, bits = FINITE[kind]
        raw[..., at] &= bits
    return raw.reshape(*shape[:-1], -1)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def window(writer) -> None:
    writer.add_sliding_window(16)
