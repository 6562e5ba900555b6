"""Which files of a hub repository make up a checkpoint: one format, and what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from posixpath import basename, dirname
from typing import Any, NamedTuple

from flaxen.convert.formats.folder import wanted_by_file
from flaxen.convert.formats.safetensors import INDEX, SINGLE
from flaxen.core.errors import CheckpointError

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"

ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")

FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""How a name ends that means a file in a repository, not a folder."""

WEIGHTS = (*FILES, ".h5", ".msgpack", ".onnx", ".ckpt", ".npz", ".tflite", ".keras")

VOCABULARY = re.compile(r"tokenizer\.json|[\w.-]+\.(model|tiktoken)|vocab\.(json|txt)|merges\.txt")
"""Any one of these makes a tokenizer."""

BESIDE = re.compile(
    r"(?!.*\.index\.json$)[\w.-]+\.json|[\w.-]+\.(model|tiktoken|jinja)|vocab\.txt|merges\.txt"
    r"|additional_chat_templates/[\w.-]+\.jinja"
)
"""Small files that say how a model is used."""

MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
"""The parts of a sentence-transformers model, which its `modules.json` lists."""

ReadJson = Callable[[str], dict[str, Any]]


class Chosen(NamedTuple):
    """Files by their path in the repository.

    path: what to open: a folder ("" is the top) or one file; needed: all that it cannot do without;
    beside: the rest.
    """

    path: str
    needed: list[str]
    beside: list[str]


def checkpoint_files(files: Iterable[str], path: str, read_json: ReadJson) -> Chosen:
    """The weights at `path` in one format, and the configuration and tokenizer beside them; those
    of an adapter, where there are no others.

    path: a folder of the repository ("" is the top), or one file.
    read_json: reads an index, to know its shards.

    Raises:
        CheckpointError: there are no weights in a format that can be read, or several GGUF files.
    """
    files = sorted(files)
    if path.endswith(FILES):
        if path not in files:
            raise CheckpointError(f"There is no {path!r} in it. {_there(files)}")
        return Chosen(path, [path], _beside(files, dirname(path)))
    here = _inside(files, path)
    indices = {INDEX: SINGLE, PICKLED_INDEX: PICKLED}
    for index, single in indices.items():
        if single in here:
            return Chosen(path, [here[single]], _beside(files, path))
        if index in here:
            shards = sorted(wanted_by_file(read_json(here[index]), here[index]))
            needed = [here[index], *(join(path, shard) for shard in shards)]
            return Chosen(path, needed, _beside(files, path))
    if ADAPTER_CONFIG in here:
        return adapter_files(files, path, read_json)
    return _gguf(files, path)


def tokenizer_files(files: Iterable[str], path: str, read_json: ReadJson) -> Chosen:
    """What a tokenizer is made of; its GGUF file, where a repository has only that.

    Raises:
        CheckpointError: there is neither.
    """
    files = sorted(files)
    if path.endswith(".gguf"):
        return checkpoint_files(files, path, read_json)
    folder = dirname(path) if path.endswith(FILES) else path
    words = [file for name, file in _inside(files, folder).items() if VOCABULARY.fullmatch(name)]
    if words:
        return Chosen(folder, words, _beside(files, folder))
    return _gguf(files, folder)


def adapter_files(files: Iterable[str], path: str, read_json: ReadJson) -> Chosen:
    """The config and the weights of an adapter.

    Raises:
        CheckpointError: there is none.
    """
    files = sorted(files)
    here = _inside(files, path)
    weights = next((here[name] for name in ADAPTERS if name in here), None)
    if weights is None or ADAPTER_CONFIG not in here:
        raise CheckpointError(
            f"{path or 'It'} has no {ADAPTER_CONFIG} with {ADAPTERS[0]}. {_there(files)}"
        )
    return Chosen(path, [here[ADAPTER_CONFIG], weights], _beside(files, path))


def _gguf(files: list[str], path: str) -> Chosen:
    found = [file for name, file in _inside(files, path).items() if name.endswith(".gguf")]
    if len(found) == 1:
        return Chosen(found[0], found, [])
    if found:
        raise CheckpointError(
            f"It has {len(found)} GGUF files; add one to the name, as in org/name/{found[0]}: "
            f"{', '.join(found)}."
        )
    raise CheckpointError(
        f"{path or 'It'} has neither {SINGLE} nor {INDEX}, {PICKLED} or a .gguf file. "
        f"{_there(files)}"
    )


def _beside(files: list[str], folder: str) -> list[str]:
    here = _inside(files, folder)
    parts = "modules.json" in here
    return [
        file
        for name, file in here.items()
        if BESIDE.fullmatch(name) or (parts and MODULE.fullmatch(name))
    ]


def _inside(files: list[str], folder: str) -> dict[str, str]:
    """Files in a folder and below, by their path from there."""
    start = f"{folder}/" if folder else ""
    return {file[len(start) :]: file for file in files if file.startswith(start)}


def stays_inside(file: str) -> bool:
    """Whether a path that a server names is one below the repository's folder."""
    return not file.startswith("/") and "\\" not in file and ".." not in file.split("/")


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _there(files: list[str]) -> str:
    """What a repository holds, weights first, and how to ask for those in a folder."""
    first = sorted(files, key=lambda file: not file.endswith(WEIGHTS))
    names = ", ".join(first[:8]) + (", ..." if len(first) > 8 else "")
    folders = [dirname(file) for file in files if basename(file) in (SINGLE, INDEX)]
    hint = f" Add a folder to the name: org/name/{folders[0]}." if any(folders[:1]) else ""
    return f"It holds {names or 'nothing'}.{hint}"
