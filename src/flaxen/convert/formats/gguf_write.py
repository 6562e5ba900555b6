"""Writing a Hugging Face model as one GGUF file."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.gguf_blocks import Q8Tensor
from flaxen.convert.formats.gguf_header import header, padding
from flaxen.convert.formats.gguf_keys import GgufKeys
from flaxen.convert.formats.gguf_names import ROPE_FACTORS, computed, gguf_layout, gguf_name
from flaxen.convert.formats.gguf_tokens import tokenizer_metadata
from flaxen.convert.lazy import LazyTensor, whole
from flaxen.convert.views import slabs
from flaxen.core.errors import CheckpointError, did_you_mean

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""The kinds that can be written, and the number that `general.file_type` has for each."""

CHUNK = 4 << 20
"""Bytes written at once."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Stored(NamedTuple):
    """A tensor as it stands in the file: `data` has its bytes, in any shape."""

    kind: str
    shape: tuple[int, ...]
    data: LazyTensor


def write_gguf(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    path: str | Path,
    *,
    kind: str = "F16",
    tokenizer_folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    pre: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a model (tensors by hub name) as a GGUF file that llama.cpp runs.

    Matrices are stored as `kind`: F16, BF16, F32 or Q8_0 (F16 where rows do not divide into blocks
    of 32); norms and biases as F32. `config` is complete, as a Hugging Face config object's
    `to_dict()`. The tokenizer is the one in `tokenizer_folder`, or that of `metadata` (a GGUF
    file's own), which then is kept as it is; without either the file has none. `pre` names the
    tokenizer's cutting rule where it is not recognised. `progress(bytes)` is called as bytes go
    out. The file takes its place when it is complete.

    Raises:
        CheckpointError: for a model, tokenizer or value that the file cannot hold.
    """
    if kind not in FILE_TYPES:
        raise CheckpointError(f"Unknown kind {kind!r}.{did_you_mean(kind, FILE_TYPES)}")
    path, keys = Path(path).expanduser(), GgufKeys(config)
    stored = _stored(tensors, keys, kind)
    vocabulary = tensors[EMBEDDING].shape[0]
    said = {
        **_general(keys, metadata or {}, path, kind),
        **keys.metadata(vocabulary),
        **keys.special_ids(),
        **_tokenizer(tokenizer_folder, metadata or {}, vocabulary, pre),
    }
    entries = {n: (s.kind, s.shape, s.data.nbytes) for n, s in stored.items()}
    with _taking_place(path) as file:
        file.write(header(said, entries))
        for name, tensor in stored.items():
            for chunk in _chunks(name, tensor):
                file.write(chunk.data)
                if progress is not None:
                    progress(chunk.nbytes)
            file.write(b"\0" * padding(tensor.data.nbytes))


def _stored(tensors: Mapping[str, LazyTensor], keys: GgufKeys, kind: str) -> dict[str, Stored]:
    """GGUF name -> tensor, in the order given."""
    if EMBEDDING not in tensors or (HEAD not in tensors and not keys.tied):
        missing = HEAD if EMBEDDING in tensors else EMBEDDING
        raise CheckpointError(f"The model has no {missing!r}; a GGUF file needs it.")
    found: dict[str, Stored] = {}
    for hub, tensor in tensors.items():
        if computed(hub) or (hub == HEAD and keys.tied):
            continue
        name = gguf_name(hub, keys.architecture)
        if name is None:
            raise CheckpointError(
                f"Tensor {hub!r} has no place in a GGUF file of architecture {keys.architecture!r}."
            )
        _check_rows(hub, tensor, keys)
        shown = gguf_layout(hub, tensor, keys.architecture, keys.heads, keys.kv_heads)
        found[name] = _encoded(shown, kind)
    divisors = keys.rope_divisors()
    if divisors is not None:
        found[ROPE_FACTORS] = _encoded(ArrayTensor(divisors), kind)
    return found


def _check_rows(hub: str, tensor: LazyTensor, keys: GgufKeys) -> None:
    heads = {"q_proj": keys.heads, "k_proj": keys.kv_heads, "v_proj": keys.kv_heads}
    rows = heads.get(hub.split(".")[-2], 0) * keys.head_dim
    if rows and tensor.shape[0] != rows:
        raise CheckpointError(
            f"Tensor {hub!r} has {tensor.shape[0]} rows; the heads that the config speaks of make "
            f"{rows}."
        )


def _encoded(tensor: LazyTensor, kind: str) -> Stored:
    if tensor.ndim == 1:
        kind = "F32"
    elif kind == "Q8_0" and tensor.shape[-1] % 32:
        kind = "F16"
    data = Q8Tensor(tensor) if kind == "Q8_0" else tensor.astype(_DTYPES[kind])
    return Stored(kind, tensor.shape, data)


def _general(keys: GgufKeys, metadata: Mapping[str, Any], path: Path, kind: str) -> dict[str, Any]:
    ours = ("general.architecture", "general.alignment", "general.file_type")
    kept = {k: v for k, v in metadata.items() if k.startswith("general.") and k not in ours}
    return {
        "general.architecture": keys.architecture,
        "general.type": "model",
        "general.name": path.stem,
        **kept,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }


def _tokenizer(
    folder: Path | None, metadata: Mapping[str, Any], vocabulary: int, pre: str | None
) -> dict[str, Any]:
    if folder is not None:
        return tokenizer_metadata(folder, vocabulary, pre)
    kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return kept or {"tokenizer.ggml.model": "none"}


def _chunks(name: str, tensor: Stored) -> Iterator[np.ndarray]:
    data = tensor.data
    for box, _ in slabs(whole(data.shape), data.dtype.itemsize, CHUNK):
        chunk = data.read(box)
        halves = chunk[..., :2].copy().view(np.float16) if tensor.kind == "Q8_0" else chunk
        if halves.dtype == np.float16 and not np.isfinite(halves).all():
            raise CheckpointError(
                f"Tensor {name!r} has values that {tensor.kind} cannot hold: too large, or not "
                "finite. Write BF16 or F32."
            )
        yield chunk.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _taking_place(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, which takes its place when the block ends without an error."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}); what was there is unchanged. Make room, or "
            "choose another path."
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
