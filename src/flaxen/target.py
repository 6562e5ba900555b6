"""What a model can be written as: a Hugging Face folder, or to a name ending in .gguf, a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flaxen.convert.dtypes import float_dtype
from flaxen.convert.formats.gguf_write import write_gguf
from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import InputError
from flaxen.families.config import hf_config

QUANTIZE = {"fp8": "folder", "gptq": "folder", "q8_0": "gguf"}
"""Ways to quantise, and the kind of target that can hold them."""

GGUF_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""How GGUF calls what matrices are stored as; F16 if nothing is asked."""


def kind_of(target: str | Path, quantize: str | None, dtype: Any) -> str:
    """ "gguf" or "folder".

    Raises:
        InputError: the target cannot hold what is asked.
    """
    kind = "gguf" if str(target).endswith(".gguf") else "folder"
    if quantize is not None and QUANTIZE.get(quantize) != kind:
        offered = ", ".join(name for name, where in QUANTIZE.items() if where == kind)
        raise InputError(f"quantize={quantize!r} is not for a {kind}; for it there is {offered}.")
    if quantize is not None and dtype is not None:
        raise InputError("quantize and dtype both say how weights are stored; leave one out.")
    wanted = float_dtype(dtype)
    if kind == "gguf" and wanted is not None and wanted.name not in GGUF_KINDS:
        raise InputError(
            f"A GGUF file cannot hold {wanted.name}; choose of {', '.join(GGUF_KINDS)}."
        )
    return kind


def has_tokenizer(folder: Path | None) -> bool:
    """Whether a folder holds a vocabulary of any kind."""
    from flaxen.text.tokenizer import VOCABULARIES

    return folder is not None and any((folder / name).is_file() for name in VOCABULARIES)


def write_file(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    path: str | Path,
    *,
    stored_as: str | None = None,
    tokenizer_folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """A GGUF file; `stored_as` is a dtype's name or "q8_0", `metadata` that of a GGUF source."""
    write_gguf(
        tensors,
        hf_config(config).to_dict(),
        path,
        kind=GGUF_KINDS[stored_as or "float16"],
        tokenizer_folder=tokenizer_folder if has_tokenizer(tokenizer_folder) else None,
        metadata=metadata,
        progress=progress,
    )
