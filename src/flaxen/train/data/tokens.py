"""Tokens of all documents one after another: in memory, or on disk for this and later runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.progress import Progress, reporting
from flaxen.train.data.encoding import Document, encoded
from flaxen.train.data.records import Records

LARGE = 64 << 20
"""Bytes of sources from which on tokens are kept on disk without being told."""

LAYOUT = 1
"""Counted up when files or what is in them change."""

ARRAYS = {"ids": np.int32, "learned": np.bool_, "lengths": np.int64, "splits": np.bool_}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """ids, learned: (n,), those of document i at `bounds[i]:bounds[i + 1]`; splits: (documents,),
    which of them rows may cut anywhere; digest: a hash of all of it.
    """

    ids: np.ndarray
    learned: np.ndarray
    bounds: np.ndarray
    splits: np.ndarray
    digest: str


def in_memory(documents: Iterable[Document]) -> Tokens:
    """Tokens that are held once, as they come."""
    sinks = {name: io.BytesIO() for name in ARRAYS}
    digest = _write(documents, sinks)
    return _tokens(
        {name: np.frombuffer(sinks[name].getbuffer(), kind) for name, kind in ARRAYS.items()},
        digest,
    )


def _tokens(arrays: dict[str, np.ndarray], digest: str) -> Tokens:
    bounds = np.concatenate([[0], np.cumsum(arrays["lengths"])])
    return Tokens(arrays["ids"], arrays["learned"], bounds, arrays["splits"], digest)


def _write(documents: Iterable[Document], sinks: Any) -> str:
    hashes = {name: hashlib.sha256() for name in ARRAYS}
    for document in documents:
        values = (document.ids, document.learned, len(document.ids), document.splits)
        for (name, kind), value in zip(ARRAYS.items(), values, strict=True):
            written = np.asarray(value, kind).tobytes()
            sinks[name].write(written)
            hashes[name].update(written)
    return hashlib.sha256("".join(h.hexdigest() for h in hashes.values()).encode()).hexdigest()


def tokens_of(
    tok: Any,
    records: Iterable[Any],
    *,
    train_on: str = "assistant",
    cache: str = "none",
    progress: Progress = False,
) -> Tokens:
    """Tokens of records. cache: a folder in which they are kept, by a hash of everything that they
    depend on; `auto` is one of the user's for large sources, `none` is memory.

    Raises:
        InputError: bad records; a folder that cannot be written.
    """
    folder = _folder(records, cache)
    if folder is None or not isinstance(records, Records):
        return in_memory(_told(encoded(tok, records, train_on), records, progress))
    about = [LAYOUT, records.digest(), fingerprint(tok), train_on]
    here = folder / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    found = stored(here)
    if found is None:
        _store(_told(encoded(tok, records, train_on), records, progress), here)
        found = stored(here)
    if found is None:
        raise InputError(f"The tokens in {here} were changed by somebody else; begin again.")
    return found


def _folder(records: Any, cache: str) -> Path | None:
    large = isinstance(records, Records) and records.size() >= LARGE
    if cache == "none" or (cache == "auto" and not large):
        return None
    if cache != "auto":
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flaxen" / "tokens"


def _told(documents: Iterable[Document], records: Any, progress: Progress) -> Iterator[Document]:
    with reporting(progress, "tokenising", len(records), unit="documents") as report:
        for document in documents:
            yield document
            if report is not None:
                report(1)


def fingerprint(tok: Any) -> str:
    """A hash of all that decides which tokens a text or a chat becomes."""
    about = [tok.backend_tokenizer.to_str(), tok.chat_template, tok.special_tokens_map]
    return hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode()).hexdigest()


def stored(here: Path) -> Tokens | None:
    """Tokens that were written there, mapped; None if they are not all there."""
    try:
        about = json.loads((here / "about.json").read_text(encoding="utf-8"))
        arrays: dict[str, np.ndarray] = {
            name: np.memmap(here / f"{name}.bin", kind, mode="r") for name, kind in ARRAYS.items()
        }
    except (OSError, ValueError):
        return None
    whole = {name: len(array) for name, array in arrays.items()} == about["sizes"]
    return _tokens(arrays, about["digest"]) if whole else None


def _store(documents: Iterable[Document], here: Path) -> None:
    """Written aside and renamed: what lies there is whole."""
    try:
        here.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{here.name}.", dir=here.parent))
    except OSError as error:
        raise _unwritable(here, error) from error
    try:
        with contextlib.ExitStack() as stack:
            files = {n: stack.enter_context((aside / f"{n}.bin").open("wb")) for n in ARRAYS}
            digest = _write(documents, files)
            sizes = {n: files[n].tell() // np.dtype(kind).itemsize for n, kind in ARRAYS.items()}
        if not sizes["ids"]:
            raise InputError("There is no token in the data.")
        about = {"sizes": sizes, "digest": digest}
        (aside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        if stored(here) is None:  # else another process was faster
            shutil.rmtree(here, ignore_errors=True)
            with contextlib.suppress(FileExistsError):
                os.rename(aside, here)
    except OSError as error:
        raise _unwritable(here, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unwritable(here: Path, error: OSError) -> InputError:
    return InputError(
        f"Tokens cannot be kept in {here.parent}: {error.strerror}. Say token_cache=FOLDER for "
        "another place, or token_cache=none for memory."
    )
