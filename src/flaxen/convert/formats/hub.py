"""Hub repositories: what a name such as `org/name` means, and its files in the hub's cache."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterable
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple

from flaxen.convert.formats.checkpoint import read_json
from flaxen.convert.formats.hub_errors import (
    ROOM,
    explained,
    explaining,
    status_of,
    unreachable,
)
from flaxen.convert.formats.hub_files import (
    FILES,
    Chosen,
    ReadJson,
    checkpoint_files,
    stays_inside,
)
from flaxen.core.errors import CheckpointError

NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<path>[^\\]*[^\\/]))?/?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")

Choose = Callable[[Iterable[str], str, ReadJson], Chosen]


class HubName(NamedTuple):
    """A place on the hub: a repository, a folder or file in it ("" is the top), a revision."""

    repository: str
    path: str
    revision: str | None
    token: str | None

    def explain(self, error: Exception) -> CheckpointError:
        return explained(error, self.repository, self.revision, endpoint())


class Listed(NamedTuple):
    """A file on the hub: its bytes, and its name among the blobs of the cache."""

    size: int
    blob: str


class Listing(NamedTuple):
    """The commit that a revision stands for, and its files."""

    commit: str
    files: dict[str, Listed]


def hub_name(name: str, revision: str | None = None, token: str | None = None) -> HubName:
    """What `org/name`, `org/name/folder` or `org/name/file.gguf` stands for.

    Raises:
        CheckpointError: it has another form.
    """
    if is_url(name):
        raise CheckpointError(f"{name} is a web address: pass remote=True to read it from there.")
    found = NAME.fullmatch(name)
    if found is None or (found["path"] is None and name.endswith(FILES)):
        raise CheckpointError(
            f"{name!r} is no file or folder here, and no hub id "
            "(org/name, org/name/folder or org/name/file.gguf)."
        )
    return HubName(found["repository"], found["path"] or "", revision, clean_token(token))


def clean_token(token: str | None) -> str | None:
    """The token without space around it.

    Raises:
        CheckpointError: it cannot be sent. It is not told: what is secret must not end in a log.
    """
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise CheckpointError("token= holds characters that no token has; expected hf_...")
    return token


def download(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    choose: Choose = checkpoint_files,
) -> Path:
    """The checkpoint of a hub repository, downloaded or from the hub's cache: a folder or a file.

    Only the weights of one format come, with the configuration and the tokenizer. Without a
    connection, or with HF_HUB_OFFLINE=1, a repository that is in the cache is found there.

    revision: branch, tag or commit; token: default is the one that `hf auth login` stored; choose:
    which files are wanted (`hub_files`).

    Raises:
        CheckpointError: absent, private, gated, without known weights, out of reach, no room.
    """
    return local(hub_name(name, revision, token), choose)


def is_url(name: str) -> bool:
    return name.startswith(("https://", "http://"))


def endpoint() -> str:
    """Where the hub is: HF_ENDPOINT, or huggingface.co."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def require_online(place: HubName) -> None:
    if offline():
        raise CheckpointError(
            f"{place.repository!r} is no path here, and not complete in the hub's cache, which is "
            "all there is to use while HF_HUB_OFFLINE is set. Unset it to download."
        )


def listing(place: HubName) -> Listing:
    """What the hub has at a place, by one short request."""
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi(endpoint(), token=place.token, library_name="flaxen").model_info(
            place.repository,
            revision=place.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        files = {
            file.rfilename: Listed(
                file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or file.rfilename
            )
            for file in info.siblings or []
            if stays_inside(file.rfilename)
        }
    except (AttributeError, KeyError, TypeError, JSONDecodeError) as error:
        raise CheckpointError(
            f"{endpoint()} answered with something else than the files of {place.repository} "
            f"({type(error).__name__}: {error}). Check HF_ENDPOINT and the connection."
        ) from error
    return Listing(str(info.sha), files)


def chosen(place: HubName, choose: Choose, files: Iterable[str], read: ReadJson) -> Chosen:
    """What `choose` takes of the files at a place, all of which are there."""
    files = list(files)
    try:
        found = choose(files, place.path, read)
    except CheckpointError as error:
        raise CheckpointError(f"{place.repository} on the hub: {error}") from error
    absent = sorted({*found.needed} - {*files})
    if absent:
        raise CheckpointError(
            f"{place.repository} on the hub has an index that names files it does not have: "
            f"{', '.join(absent)}. Pass another revision=."
        )
    return found


def local(place: HubName, choose: Choose) -> Path:
    """What `choose` takes, downloaded or from the cache."""
    with explaining(place.explain):
        if offline() or COMMIT.fullmatch(place.revision or ""):
            kept = _cached(place, choose)
            if kept is not None:
                return kept
        require_online(place)
        try:
            found = listing(place)
        except unreachable() as error:
            # No answer, or none that says anything about the repository.
            kept = _cached(place, choose) if (status_of(error) or 500) >= 429 else None
            if kept is None:
                raise
            return kept
        return _fetched(place, found, choose)


def _cached(place: HubName, choose: Choose) -> Path | None:
    """What the cache has, if that is all that is needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        top = Path(
            snapshot_download(
                place.repository,
                revision=place.revision,
                local_files_only=True,
                allow_patterns=[],
            )
        )
    except LocalEntryNotFoundError:
        return None
    files = [path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()]
    try:
        found = choose(files, place.path, lambda file: read_json(top / file))
    except CheckpointError:
        return None
    return top / found.path if set(found.needed) <= set(files) else None


def _fetched(place: HubName, found: Listing, choose: Choose) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    where = {"endpoint": endpoint(), "token": place.token, "library_name": "flaxen"}
    get = functools.partial(hf_hub_download, place.repository, revision=found.commit, **where)
    picked = chosen(place, choose, found.files, lambda file: read_json(Path(get(file))))
    files = [*picked.needed, *picked.beside]
    here = _kept(place, found.commit, files)
    if here is None:
        _check_room(place, [found.files[file] for file in files])
        here = Path(
            snapshot_download(
                place.repository,
                revision=place.revision,
                allow_patterns=[_literal(file) for file in files],
                tqdm_class=_bar(),
                **where,
            )
        )
    absent = [file for file in picked.needed if not (here / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{place.repository} on the hub lists files that it does not give: "
            f"{', '.join(absent)}. Try again later."
        )
    return here / picked.path


def _kept(place: HubName, commit: str, files: list[str]) -> Path | None:
    """The folder in the cache that has all these files of a commit, which the revision is."""
    from huggingface_hub import try_to_load_from_cache

    folder = None
    for file in files:
        path = try_to_load_from_cache(place.repository, file, revision=place.revision)
        if not isinstance(path, str) or not path.endswith(f"{commit}/{file}"):
            return None
        folder = Path(path.removesuffix(file))
    return folder


def _check_room(place: HubName, files: list[Listed]) -> None:
    """Refuse to start what cannot end."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    blobs = cache / f"models--{place.repository.replace('/', '--')}" / "blobs"
    needed = sum(file.size for file in files if not (blobs / file.blob).is_file())
    disk = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise CheckpointError(
            f"{place.repository} needs {needed / 1e9:.1f} GB more in {cache}, where "
            f"{free / 1e9:.1f} GB are free. {ROOM}"
        )


def _bar() -> Any:
    """The hub's progress bar, on a terminal alone."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": kwargs.get("disable")})

    return Bar


def _literal(file: str) -> str:
    """The pattern that only this file matches."""
    return re.sub(r"([*?[])", r"[\1]", file)
