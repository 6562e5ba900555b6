"""A checkpoint: lazy tensors under the names of the hub, and what stands beside them."""

from __future__ import annotations

import json
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


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a `.safetensors` or `.gguf` file, or a hub id such as `org/name`.

    Raises:
        CheckpointError: nothing is there, or what is there is damaged.
    """
    here = Path(path).expanduser()
    if here.suffix == ".gguf" and here.is_file():
        from flaxen.convert.formats.gguf import open_gguf

        return open_gguf(here)
    if here.is_dir() or here.is_file():
        from flaxen.convert.formats.safetensors import open_safetensors

        return open_safetensors(here)
    return open_checkpoint(download(str(path)))


def download(repository: str) -> Path:
    """The folder of a hub repository, downloaded or from the hub's own cache."""
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{repository!r} is no file or folder here, and no hub id (org/name)."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["model*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab*"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{repository!r} is neither a path here nor a hub repository that can be reached "
            f"({type(error).__name__}). Check the name and the connection, or pass a local folder."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except NO_JSON as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value
