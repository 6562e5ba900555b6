"""`flaxen embed`: one vector for each text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from flaxen.cli.options import Count, Json, Loading, Source, about, no_options
from flaxen.cli.output import print_json, print_out, remark, write_now
from flaxen.core.errors import InputError
from flaxen.core.whole_file import whole_file

SHOWN = 12
"""Texts in a table of cosines: as many as fit beside each other."""


def embed(
    model: Source,
    texts: Annotated[
        tuple[str, ...],
        about(
            "The texts, or - to read one a line from standard input.",
            allow_leading_hyphen=True,
            show_default=False,
            validator=no_options,
        ),
    ] = (),
    *,
    input: Annotated[Path | None, about("A file with one text a line.")] = None,
    output: Annotated[Path | None, about("Write the vectors there, as .npy.")] = None,
    prompt: Annotated[str | None, about("A text before every text.")] = None,
    prompt_name: Annotated[str | None, about("One of the model's own prompts (query).")] = None,
    batch_size: Annotated[Count, about("Texts that run together.")] = 32,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """One vector for each text; of several, a table of how alike they are (cosines)."""
    given = _given(texts, input)
    if output is not None and output.suffix != ".npy":
        raise InputError(f"--output is {output}; expected a name ending in .npy.")
    tok = loading.tokenizer(model)
    vectors = loading.load(model).embed(
        given, tok=tok, batch_size=batch_size, prompt=prompt, prompt_name=prompt_name
    )
    if output is not None:
        try:
            with whole_file(output) as aside, aside.open("wb") as file:
                np.save(file, vectors)
        except OSError as error:
            raise InputError(f"{output} cannot be written: {error.strerror}.") from error
        remark(f"{output}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers, float32")
    if json:
        print_json(_as_json(given, vectors, output is None))
    elif len(given) > 1:
        _print_cosines(given, vectors)
    elif output is None:
        write_now(" ".join(f"{x:.6g}" for x in vectors[0]) + "\n")


def _given(texts: tuple[str, ...], file: Path | None) -> list[str]:
    """
    Raises:
        InputError: no texts, or a file that cannot be read.
    """
    found = list(texts)
    if file is not None:
        try:
            found += file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not text in UTF-8: {error}.") from error
    if found == ["-"] or not found:
        found = sys.stdin.read().splitlines()
    kept = [text for text in found if text.strip()]
    if not kept:
        raise InputError("There are no texts; give them as arguments, or one a line with --input.")
    if len(kept) < len(found):
        remark(f"Empty lines have no vector and are left out: {len(found) - len(kept)}.")
    return kept


def cosines(vectors: np.ndarray) -> np.ndarray:
    """How alike each two vectors are, (N, N); 0 where one is zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1)
    return unit @ unit.T


def _as_json(texts: list[str], vectors: np.ndarray, with_vectors: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"texts": texts, "width": vectors.shape[1]}
    if with_vectors:
        out["vectors"] = [[float(x) for x in row] for row in vectors]
    if len(texts) <= SHOWN:
        out["cosines"] = [[round(float(x), 6) for x in row] for row in cosines(vectors)]
    return out


def _print_cosines(texts: list[str], vectors: np.ndarray) -> None:
    from rich.table import Table
    from rich.text import Text

    shown = min(len(texts), SHOWN)
    table = Table(title="How alike (cosine)")
    table.add_column("")
    table.add_column("text", max_width=48, no_wrap=True, overflow="ellipsis")
    for i in range(shown):
        table.add_column(str(i + 1), justify="right")
    for i, row in enumerate(cosines(vectors[:shown])):
        table.add_row(str(i + 1), Text(texts[i]), *(f"{x:.3f}" for x in row))
    print_out(table)
    if shown < len(texts):
        remark(f"{len(texts) - shown} more texts; --output keeps all vectors.")
