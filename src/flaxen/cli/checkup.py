"""What `flaxen doctor` looks at beside the fit of names and shapes: files, tokenizer, values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.core.errors import FlaxenError
from flaxen.core.progress import reporting

if TYPE_CHECKING:
    from flaxen.convert.formats.checkpoint import Checkpoint
    from flaxen.convert.lazy import LazyTensor

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def files(checkpoint: Checkpoint) -> dict[str, Any]:
    """What stands in the files: tensors and bytes by dtype, files of weights that are not used."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.values():
        sizes[tensor.dtype.name] += tensor.nbytes
    scheme = checkpoint.quantization or {}
    found = {
        "format": checkpoint.format,
        "tensors": len(checkpoint),
        "bytes": dict(sizes.most_common()),
        "quantization": checkpoint.metadata.get("quantization") or scheme.get("quant_method"),
    }
    if checkpoint.folder is not None:
        used = {Path(file).name for file in checkpoint.files}
        beside = (f.name for f in checkpoint.folder.iterdir() if f.suffix in WEIGHTS)
        found["not used"] = sorted(name for name in beside if name not in used)
    return found


def tokenizer(
    source: str, revision: str | None, config: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The tokenizer in short, and what in it does not go with the config."""
    import flaxen
    from flaxen.target import has_tokenizer

    try:
        tok = flaxen.tokenizer(source, revision=revision)
    except FlaxenError as error:
        damaged = Path(source).is_dir() and has_tokenizer(Path(source))
        return {"found": "none"}, [f"the tokenizer is damaged: {error}"] if damaged else []
    ids = set(tok.get_vocab().values())
    about = {
        "found": type(tok).__name__,
        "tokens": len(ids),
        "chat template": bool(tok.chat_template),
        **{name: getattr(tok, name, None) for name in SPECIAL},
    }
    problems, room = [], config.get("vocab_size")
    if isinstance(room, int) and ids and max(ids) >= room:
        problems.append(f"the tokenizer makes ids up to {max(ids)}, the model takes {room}")
    for name in SPECIAL:
        ours, theirs = config.get(name), about[name]
        listed = ours if isinstance(ours, list) else [ours]
        if ours is not None and theirs is not None and theirs not in listed:
            problems.append(f"{name} is {theirs} in the tokenizer and {ours} in the config")
    return about, problems


def values(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Read everything: which tensors hold NaN or infinity, or the same number throughout."""
    from flaxen.convert.lazy import is_float, whole
    from flaxen.convert.views import slabs

    problems = []
    with reporting(True, "Reading", sum(t.nbytes for t in tensors.values())) as progress:
        for name, tensor in tensors.items():
            bad, low, high = 0, np.inf, -np.inf
            for box, _ in slabs(whole(tensor.shape), tensor.dtype.itemsize, 1 << 22):
                part = tensor.read(box)
                if progress is not None:
                    progress(part.nbytes)
                if is_float(part.dtype) and part.size:
                    part = part.astype(np.float32)
                    bad += int(np.count_nonzero(~np.isfinite(part)))
                    low, high = min(low, float(part.min())), max(high, float(part.max()))
            if bad:
                problems.append(f"{name}: {bad} values are NaN or infinite")
            elif tensor.ndim > 1 and tensor.size > 1 and low == high:
                problems.append(f"{name}: every value is {low:g}")
    return problems
