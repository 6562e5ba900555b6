"""Documents of one file, one after another: JSON lines, JSON arrays, texts, parquet."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flaxen.core.errors import InputError

Fields = dict[str, Any]
Found = tuple[str, Fields | str]
"""Where a document is, and itself or what is wrong with it."""

SUFFIXES = {".jsonl": "lines", ".json": "json", ".txt": "text", ".md": "text"}
SUFFIXES |= {".parquet": "parquet"}
PACKED = (".gz", ".zst")
KINDS_OF_FILES = f"{', '.join(SUFFIXES)} (text and JSON also as .gz or .zst)"


def kind_of_file(path: str | os.PathLike[str]) -> str | None:
    """`lines`, `json`, `text` or `parquet`; None for what cannot be read."""
    suffixes = Path(path).suffixes
    packed = suffixes[-1:] and suffixes[-1] in PACKED
    kind = (
        SUFFIXES.get((suffixes[-2:-1] if packed else suffixes[-1:] or [""])[0])
        if suffixes
        else None
    )
    return None if packed and kind == "parquet" else kind


def documents(file: Path) -> Iterator[Found]:
    """Every document of a file; a text is one. Only what is given out is kept in memory, of a JSON
    array all of it.

    Raises:
        InputError: the file cannot be read.
    """
    readers = {"lines": _lines, "json": _json, "text": _text, "parquet": _parquet}
    with reading(file):
        yield from readers[kind_of_file(file) or "text"](file)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """
    Raises:
        InputError: the file cannot be read, or is damaged.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{file} cannot be read: {why}.") from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """What is inside, behind the mark that some programs put before UTF-8."""
    with _unpacked(file) as stream:
        if stream.peek(3).startswith(codecs.BOM_UTF8):
            stream.read(3)
        yield stream


@contextlib.contextmanager
def _unpacked(file: Path) -> Iterator[Any]:
    if file.suffix == ".gz":
        with gzip.open(file) as stream:
            yield stream
    elif file.suffix == ".zst":
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd") as stream:
            yield io.BufferedReader(stream)
    else:
        with file.open("rb") as stream:
            yield stream


def _lines(file: Path) -> Iterator[Found]:
    with _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file}:{number}", _parsed(line)


def _json(file: Path) -> Iterator[Found]:
    """An array of documents, or lines as in .jsonl."""
    with _opened(file) as stream:
        start = stream.read(4096).lstrip()
    if not start.startswith(b"["):
        yield from _lines(file)
        return
    with _opened(file) as stream:
        raw = stream.read()
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        yield str(file), f"not JSON ({error})"
        return
    for number, fields in enumerate(found):
        yield f"{file}[{number}]", _fields(fields, raw)


def _parsed(line: bytes) -> Fields | str:
    try:
        return _fields(json.loads(line), line)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"


HALVES = re.compile(rb"\\u[dD][89a-fA-F]")


def _fields(found: Any, raw: bytes) -> Fields | str:
    """A document out of JSON, which may escape half of a character; no tokenizer takes that."""
    if not isinstance(found, dict):
        return f"found a {type(found).__name__}"
    if HALVES.search(raw):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"has {error.object[error.start]!r}, which is half of a character"
    return found


def _text(file: Path) -> Iterator[Found]:
    with _opened(file) as stream:
        raw = stream.read()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        yield str(file), f"byte {error.start} is not UTF-8"
        return
    if text.strip():
        yield str(file), {"text": text}


def _parquet(file: Path) -> Iterator[Found]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", without_nothing(row)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield str(file), f"not parquet ({error})"


def without_nothing(row: Any) -> Any:
    """A row of a table without what it has not: tables fill up rows, and what lies in them, to the
    same fields.
    """
    if isinstance(row, dict):
        return {key: without_nothing(value) for key, value in row.items() if value is not None}
    return [without_nothing(value) for value in row] if isinstance(row, list) else row
