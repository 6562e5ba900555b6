"""A checkpoint: lazy tensors under the names of the hub, and what stands beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flaxen.convert.lazy import ByteCounter, LazyTensor
from flaxen.core.errors import CheckpointError

NO_JSON = (ValueError, RecursionError)
"""What reading JSON raises: wrong syntax or encoding, numbers of too many digits, deep nesting."""


class Checkpoint(Mapping[str, LazyTensor]):
    """Tensors by hub name.

    `config` and `generation_config` are what stands in the files of those names; `format` says in
    what the weights are stored, `files` where; `metadata` is the format's own; `counter` counts the
    bytes that every tensor reads; `close` lets go of the files.
    """

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        *,
        counter: ByteCounter,
        config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        folder: Path | None = None,
        format: str = "",
        files: Iterable[str | Path] = (),
        metadata: Mapping[str, Any] | None = None,
        close: Callable[[], None] = lambda: None,
    ):
        self._tensors = dict(tensors)
        self.counter = counter
        self.config = config or {}
        self.generation_config = generation_config
        self.folder = folder
        self.format = format
        self.files = [str(file) for file in files]
        self.metadata = dict(metadata or {})
        self.close = close

    @property
    def bytes_read(self) -> int:
        """Bytes asked of the files so far."""
        return self.counter.total

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(
    path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    remote: bool = False,
) -> Checkpoint:
    """Open a Hugging Face folder, a file of weights, or a hub id such as `org/name`.

    Files: `.safetensors`, `.gguf`, and `.bin`, `.pt` or `.pth` of torch.save. A folder that has
    safetensors is read from those; else from pytorch_model.bin or its shards. A hub id may go on
    with a folder or a file of the repository: `org/name/file.gguf`.

    revision, token: of a hub id: branch, tag or commit; the account's token (default: the one
    stored by `hf auth login`). remote: download no file; only the bytes of what is read, of a hub
    id or of the `https://` address of a `.safetensors` file.

    Raises:
        CheckpointError: nothing is there, or what is there is damaged or out of reach.
    """
    here = Path(path).expanduser()
    if os.path.exists(here):
        return _open(here)
    if remote:
        from flaxen.convert.formats.remote import open_remote

        return open_remote(str(path), revision=revision, token=token)
    from flaxen.convert.formats.hub import download

    return _open(download(str(path), revision=revision, token=token))


def _open(path: Path) -> Checkpoint:
    if path.suffix == ".gguf" and path.is_file():
        from flaxen.convert.formats.gguf import open_gguf

        return open_gguf(path)
    if _of_torch(path):
        from flaxen.convert.formats.torch_file import open_torch

        return open_torch(path)
    from flaxen.convert.formats.safetensors import open_safetensors

    return open_safetensors(path)


def _of_torch(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (".bin", ".pt", ".pth")
    has = lambda stem: any((path / f"{stem}{end}").is_file() for end in ("", ".index.json"))
    return has("pytorch_model.bin") and not has("model.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return parse_json(path.read_bytes(), path)


def parse_json(text: bytes, where: str | Path) -> dict[str, Any]:
    """The object in JSON that was read from `where`."""
    try:
        value = json.loads(text.decode("utf-8"))
    except NO_JSON as error:
        raise CheckpointError(f"{where} is no valid JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}, not a JSON object.")
    return value
