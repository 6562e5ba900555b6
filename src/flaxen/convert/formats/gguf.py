"""GGUF files as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.formats.gguf_blocks import BlockTensor, StoredTensor
from flaxen.convert.formats.gguf_config import GgufConfig
from flaxen.convert.formats.gguf_file import GgufFile, TensorEntry
from flaxen.convert.formats.gguf_names import computed, hub_layout, hub_name
from flaxen.convert.lazy import ByteCounter, LazyTensor
from flaxen.core.errors import CheckpointError

STORED = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


def open_gguf(path: str | Path) -> Checkpoint:
    """A GGUF file under the names, shapes and row order of the Hugging Face model it was made of.

    Quantised tensors are shown in float32; a read works out only the rows it is asked for.
    Architectures: llama (and mistral, which is stored as llama), qwen2, qwen3, gemma3 (text).
    Raises CheckpointError for anything damaged or unknown, before a tensor is read.
    """
    file = GgufFile(path)
    about = GgufConfig(file)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: it holds no token_embd.weight (a vocabulary only?).")
    counter, buffer = ByteCounter(), np.frombuffer(file.buffer, np.uint8)
    tensors: dict[str, LazyTensor] = {}
    for name, entry in file.tensors.items():
        if not computed(name):
            hub = _known(file, name, about)
            tensor = _tensor(entry, buffer, counter)
            tensors[hub] = hub_layout(hub, tensor, about.architecture, about.heads, about.kv_heads)
    return Checkpoint(
        tensors,
        counter=counter,
        config=about.config(tensors["model.embed_tokens.weight"].dtype.name),
        generation_config=about.generation_config(),
        format="gguf",
        files=[file.path],
        metadata=file.metadata,
    )


def _known(file: GgufFile, name: str, about: GgufConfig) -> str:
    hub = hub_name(name, about.architecture)
    if hub is None:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is not one of architecture {about.architecture!r}."
        )
    heads = {"q_proj": about.heads, "k_proj": about.kv_heads, "v_proj": about.kv_heads}
    rows = heads.get(hub.split(".")[-2], 0) * about.head_dim
    if rows and file.tensors[name].shape[0] != rows:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has {file.tensors[name].shape[0]} rows; its heads of "
            f"{about.head_dim} channels make {rows}."
        )
    return hub


def _tensor(entry: TensorEntry, buffer: np.ndarray, counter: ByteCounter) -> LazyTensor:
    if entry.type.name in STORED:
        return StoredTensor(entry, STORED[entry.type.name], buffer, counter)
    return BlockTensor(entry, buffer, counter)
