"""Safetensors on the hub, or behind a URL, read where they are: no file is downloaded."""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from posixpath import basename, dirname
from typing import Any
from urllib.parse import quote

import numpy as np

from flaxen.convert.formats.checkpoint import Checkpoint, parse_json
from flaxen.convert.formats.folder import wanted_by_file
from flaxen.convert.formats.hub import (
    HubName,
    chosen,
    clean_token,
    endpoint,
    hub_name,
    is_url,
    listing,
    require_online,
)
from flaxen.convert.formats.hub_errors import explaining, status_of
from flaxen.convert.formats.hub_files import checkpoint_files, join
from flaxen.convert.formats.ranges import RemoteFile
from flaxen.convert.formats.safetensors import INDEX, MAX_HEADER, parse_header, stored
from flaxen.convert.formats.source import Entry
from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, box_shape, shifted
from flaxen.convert.reshaping import runs, single_run
from flaxen.convert.views import slabs
from flaxen.core.errors import CheckpointError

FIRST = 16 << 10
"""Bytes asked of each file at first: many headers are shorter, and none costs more than one."""

GAP = 256 << 10
"""Bytes between two stretches that are read along, since another request would take longer."""

PIECE = 8 << 20
"""Bytes read at a time where there are gaps."""

RECENT = 256 << 20
"""Bytes kept, of pieces with gaps: what is a gap to one device is what its neighbour asks for."""

HEADERS_AT_ONCE = 8
"""Files whose headers are read at the same time."""

Key = tuple[str, int, int]


class Recent:
    """Pieces read a moment ago, or being read by another thread."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[Key, Future[np.ndarray]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, source: RemoteFile, start: int, stop: int) -> np.ndarray:
        key = (source.url, start, stop)
        with self._lock:
            piece = self._pieces.get(key)
            mine = piece is None
            if mine:
                piece = self._pieces[key] = Future()
                self._nbytes += stop - start
                while self._nbytes > RECENT and len(self._pieces) > 1:
                    self._forget(next(iter(self._pieces)))
        if mine:
            values = np.empty(stop - start, np.uint8)
            try:
                source.read_into(start, values)
            except BaseException as error:
                with self._lock:
                    self._forget(key)
                piece.set_exception(error)
                raise
            piece.set_result(values)
        return piece.result()

    def _forget(self, key: Key) -> None:
        if self._pieces.pop(key, None) is not None:
            self._nbytes -= key[2] - key[1]


class RemoteTensor(LazyTensor):
    """A tensor in a file on a server."""

    def __init__(self, source: RemoteFile, entry: Entry, recent: Recent):
        self.source, self.start, self.recent = source, entry.start, recent
        self.dtype, self.shape = entry.dtype, entry.shape

    def fill(self, box: Box, out: np.ndarray) -> None:
        run = single_run(box, self.shape) if out.flags.c_contiguous else None
        if run is not None:
            self.source.read_into(self.start + run[0] * self.dtype.itemsize, out)
            return
        wide = widened(box, self.shape, self.dtype.itemsize)
        for part, _ in slabs(wide, self.dtype.itemsize, PIECE):
            both = _common(part, box)
            if both is not None:
                values = self._piece(part, shared=wide != box)
                out[(*_within(both, box), ...)] = values[(*_within(both, part), ...)]

    def _piece(self, part: Box, *, shared: bool) -> np.ndarray:
        size, at = self.dtype.itemsize, 0
        values = np.empty(math.prod(box_shape(part)) * size, np.uint8)
        for first, last in runs(part, self.shape):
            start, stop = self.start + first * size, self.start + last * size
            target = values[at : at + stop - start]
            at += stop - start
            if shared:
                np.copyto(target, self.recent.get(self.source, start, stop))
            else:
                self.source.read_into(start, target)
        return values.view(self.dtype).reshape(box_shape(part))


def widened(box: Box, shape: tuple[int, ...], itemsize: int) -> Box:
    """The box grown over gaps that are quicker read than skipped, from the last axis outwards."""
    wide = list(box)
    for axis in reversed(range(len(shape))):
        if single_run(tuple(wide), shape) is not None:
            break
        missing = shape[axis] - (wide[axis].stop - wide[axis].start)
        if missing * math.prod(shape[axis + 1 :]) * itemsize > GAP:
            break
        wide[axis] = slice(0, shape[axis])
    return tuple(wide)


def _common(a: Box, b: Box) -> Box | None:
    """The box that is in both, if there is one."""
    both = tuple(
        slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def _within(inner: Box, box: Box) -> Box:
    return tuple(shifted(s, -t.start) for s, t in zip(inner, box, strict=True))


def open_remote(name: str, *, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """Open safetensors of a hub id, or at the URL of one file, by their headers alone.

    Raises:
        CheckpointError: as `hub.download` does, and where the server cannot send parts of files.
    """
    counter = ByteCounter()
    if is_url(name):
        token = clean_token(token)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        source = RemoteFile(name, headers, counter, functools.partial(_explained_url, name))
        tensors, metadata = _tensors({name: source}, None)
        return Checkpoint(
            tensors, counter=counter, format="safetensors", files=[name], metadata=metadata
        )
    place = hub_name(name, revision, token)
    with explaining(place.explain):
        require_online(place)
        return _open_hub(place, counter)


def _open_hub(place: HubName, counter: ByteCounter) -> Checkpoint:
    found = listing(place)
    source = functools.partial(_source, place, found.commit, counter)

    @functools.cache
    def read(file: str) -> dict[str, Any]:
        return parse_json(source(file).whole(MAX_HEADER), f"{file} of {place.repository}")

    picked = chosen(place, checkpoint_files, found.files, read)
    first, *shards = picked.needed
    if not first.endswith((".safetensors", INDEX)):
        raise CheckpointError(
            f"{place.repository} has no safetensors but {first}, which can only be read once it is "
            "downloaded. Load it without remote=True (--download on the command line)."
        )
    wanted = wanted_by_file(read(first), first) if shards else None
    tensors, metadata = _tensors(
        {basename(file): source(file) for file in shards or [first]}, wanted
    )
    folder = dirname(first)
    config, generation = (
        read(file) if (file := join(folder, name)) in found.files else None
        for name in ("config.json", "generation_config.json")
    )
    return Checkpoint(
        tensors,
        counter=counter,
        config=config,
        generation_config=generation,
        format="safetensors",
        files=shards or [first],
        metadata=metadata,
    )


def _source(place: HubName, commit: str, counter: ByteCounter, file: str) -> RemoteFile:
    from huggingface_hub.utils import build_hf_headers

    url = f"{endpoint()}/{place.repository}/resolve/{commit}/{quote(file)}"
    headers = build_hf_headers(token=place.token, library_name="flaxen")
    return RemoteFile(url, headers, counter, place.explain)


def _tensors(
    sources: dict[str, RemoteFile], wanted: dict[str, list[str]] | None
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors of files, those that an index wants, and the metadata of all files."""
    with ThreadPoolExecutor(HEADERS_AT_ONCE, "flaxen-headers") as pool:
        headers = list(pool.map(_header, sources.values()))
    recent = Recent()
    tensors: dict[str, LazyTensor] = {}
    metadata: dict[str, Any] = {}
    for (file, source), (entries, extra) in zip(sources.items(), headers, strict=True):
        metadata |= extra
        for name in wanted[file] if wanted else entries:
            if name not in entries:
                raise CheckpointError(
                    f"The index says that {name!r} is in {source.url}, but it is not. "
                    "Pass another revision=."
                )
            whole_bytes = functools.partial(RemoteTensor, source, recent=recent)
            tensors[name] = stored(entries[name], whole_bytes)
    return tensors, metadata


def _header(source: RemoteFile) -> tuple[dict[str, Entry], dict[str, str]]:
    start = source.first(FIRST)
    at = 0

    def read(nbytes: int) -> bytes:
        nonlocal at
        known = start[at : at + nbytes]
        rest = np.empty(nbytes - len(known), np.uint8)
        source.read_into(at + len(known), rest)
        at += nbytes
        return known + rest.tobytes()

    return parse_header(source.url, source.size or 0, read)


def _explained_url(url: str, error: Exception) -> CheckpointError:
    status = status_of(error)
    return CheckpointError(
        f"{url} cannot be read: the server answered {status}."
        if status
        else f"{url} cannot be reached: {error}."
    )
