"""`flaxen data`: what is learned from, before it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from flaxen.cli.options import Count, Json, about
from flaxen.cli.output import has_colours, marks, print_json, print_out, remark

if TYPE_CHECKING:
    from flaxen.train.run.look import Shown

WHOLE = 1 << 20
"""Tokens of a row that any record fits into."""

BAR = 40


def data(
    what: Annotated[
        Literal["show", "stats"], about("One record with its loss; or all in numbers.")
    ],
    files: Annotated[list[str], about("Files, globs, folders or hf:owner/name.")],
    *,
    model: Annotated[str, about("Whose tokenizer and chat template.")],
    revision: Annotated[str | None, about("Branch, tag or commit of a hub id.")] = None,
    index: Annotated[Count, about("Which record to show, from 0.")] = 0,
    objective: Annotated[str, about("What is minimised: causal, dpo, grpo, ...")] = "causal",
    seq_len: Annotated[Count | None, about("Tokens in a row; show: all, stats: 512.")] = None,
    train_on: Annotated[
        Literal["assistant", "last", "all"], about("What is learned of a chat.")
    ] = "assistant",
    columns: Annotated[
        list[str] | None, about("Our names of fields and theirs, e.g. prompt=instruction.")
    ] = None,
    ids: Annotated[bool, about("One line a token, with its id.")] = False,
    json: Json = False,
) -> None:
    """Show one record as tokens, those that are learned in green; or statistics of all records.

    Without colours (NO_COLOR, or into a file), what is learned stands in ⟦ ⟧.
    """
    import flaxen
    from flaxen.cli.train_flags import as_mapping
    from flaxen.train import OBJECTIVES, TrainConfig
    from flaxen.train.data.parts import parts_of
    from flaxen.train.data.records import Records
    from flaxen.train.run.look import record_at, shown

    parts = parts_of(files, as_mapping(columns))
    tok = flaxen.tokenizer(model, revision=revision)
    config = TrainConfig(
        output="",
        objective=objective,
        seq_len=seq_len or WHOLE,
        train_on=train_on,
        packing=False,
        batch_size=TrainConfig.num_generations,
    )
    kinds = OBJECTIVES[objective].kinds
    if what == "stats":
        found = _statistics(tok, Records(parts, kinds), seq_len or 512, train_on)
        if json:
            print_json(found)
            return
        for part in _told(found):
            print_out(part)
        return
    record = record_at(parts, kinds, index)
    rows, numbers = shown(OBJECTIVES[objective](config, tok), tok, record)
    if json:
        print_json(_as_json(tok, record.where, rows, numbers))
    else:
        _print_rows(tok, record.where, rows, numbers, ids)


def _statistics(tok: Any, records: Any, seq_len: int, train_on: str) -> dict[str, Any]:
    from flaxen.train.data.kinds import CAUSAL
    from flaxen.train.run.numbers import sizes, statistics

    about: Any = {"seq_len": seq_len, "progress": sys.stderr.isatty()}
    if records.kinds == CAUSAL:
        return statistics(tok, records, train_on=train_on, **about)
    return sizes(tok, records, **about)


def _as_json(tok: Any, where: str, rows: list[Shown], numbers: dict[str, int]) -> dict[str, Any]:
    from flaxen.text import token_texts

    out: dict[str, Any] = {"where": where} | numbers
    for row in rows:
        ids = row.ids.tolist()
        out[row.name] = {
            "ids": ids,
            "learned": row.learned.astype(int).tolist(),
            "texts": token_texts(tok, ids),
        }
    return out


def _print_rows(
    tok: Any, where: str, rows: list[Shown], numbers: dict[str, int], ids: bool
) -> None:
    from rich.text import Text

    from flaxen.text import token_texts

    special = set(tok.all_special_ids)
    coloured = has_colours()
    begins, ends = ("", "") if coloured or ids else marks()
    for row in rows:
        share = f"{int(row.learned.sum())} of {len(row.ids)} tokens learned"
        print_out(Text(f"{row.name} ({share})", style="bold"))
        texts = token_texts(tok, row.ids.tolist())
        line, before = Text(), False
        for number, learned, text in zip(row.ids.tolist(), row.learned, texts, strict=True):
            style = ("bold " if number in special else "") + ("green" if learned else "dim")
            if ids:
                line.append(f"{number:>8}  {'learned' if learned else '':<8} {text!r}\n", style)
                continue
            if learned != before:
                line.append(begins if learned else ends)
            line.append(text, style)
            before = learned
        print_out(line.append(ends) if before and not ids else line)
    for name, number in numbers.items():
        print_out(f"{name}: {number}")
    mark = "green" if coloured else "what says so" if ids else f"what stands in {begins} {ends}"
    remark(f"{where}; {mark} is learned, all else is read only.")


def _told(found: dict[str, Any]) -> Iterator[Any]:
    """Statistics in words and a table."""
    yield from _of_documents(found) if "documents" in found else _of_records(found)


def _of_documents(found: dict[str, Any]) -> Iterator[Any]:
    tokens, lengths = found["tokens"], found["lengths"]
    yield (
        f"{found['documents']:,} documents, {tokens:,} tokens, of which "
        f"{found['learned'] / max(tokens, 1):.1%} are learned\n"
        f"Tokens of a document: {lengths['least']:,} to {lengths['most']:,}, "
        f"mean {lengths['mean']:,.1f}, median {lengths['median']:,.0f}"
    )
    yield _bars("documents", found["histogram"])
    yield (
        f"Rows of {found['seq_len']:,} tokens: {found['rows_packed']:,} packed, "
        f"{found['full_packed']:.1%} full; {found['examples']:,} padded, "
        f"{found['full_padded']:.1%} full"
    )
    if found["overlong"]:
        yield f"{found['overlong']:,} chats and completions are longer than a row."


def _of_records(found: dict[str, Any]) -> Iterator[Any]:
    yield f"{found['records']:,} records"
    for name, n in found["lengths"].items():
        yield (
            f"Tokens of {name}: {n['least']:,} to {n['most']:,}, mean {n['mean']:,.1f}, median "
            f"{n['median']:,.0f}"
        )
    yield _bars("rows", found["histogram"])
    yield f"{found['overlong']:,} of {found['rows']:,} rows are longer than {found['seq_len']:,}."
    for label, count in found["labels"].items():
        yield f"label {label}: {count:,} ({count / found['records']:.1%})"


def _bars(what: str, histogram: dict[int, int]) -> Any:
    from rich.table import Table

    table = Table()
    table.add_column("tokens", justify="right")
    table.add_column(what, justify="right")
    table.add_column("")
    most = max(histogram.values())
    for edge, count in histogram.items():
        table.add_row(f"to {edge:,}", f"{count:,}", "█" * round(BAR * count / most))
    return table
