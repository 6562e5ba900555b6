"""`flaxen data`: what is learned from, before it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from flaxen.cli.options import Count, Json, about
from flaxen.cli.output import print_json, print_out, remark
from flaxen.core.errors import InputError

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
    objective: Annotated[str, about("What is minimised.")] = "causal",
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
    """Show one record as tokens, those that are learned in green; or statistics of all records."""
    import flaxen
    from flaxen.cli.train_flags import as_mapping
    from flaxen.train.data.parts import parts_of

    parts = parts_of(files, as_mapping(columns))
    tok = flaxen.tokenizer(model, revision=revision)
    if what == "stats":
        if objective != "causal":
            raise InputError("Statistics are of texts and chats alone; leave --objective out.")
        from flaxen.train.data.records import Records
        from flaxen.train.run.look import statistics

        found = statistics(
            tok,
            Records(parts),
            seq_len=seq_len or 512,
            train_on=train_on,
            progress=sys.stderr.isatty(),
        )
        print_json(found) if json else _print_statistics(found)
        return
    from flaxen.train import OBJECTIVES, TrainConfig
    from flaxen.train.run.look import record_at, shown

    config = TrainConfig(
        output="",
        objective=objective,
        seq_len=seq_len or WHOLE,
        train_on=train_on,
        packing=False,
        batch_size=2,
    )
    made = OBJECTIVES[objective](config, tok)
    record = record_at(parts, made.kinds, index)
    rows, numbers = shown(made, tok, record)
    if json:
        print_json(_as_json(tok, record.where, rows, numbers))
    else:
        _print_rows(tok, record.where, rows, numbers, ids)


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
    for row in rows:
        share = f"{int(row.learned.sum())} of {len(row.ids)} tokens learned"
        print_out(Text(f"{row.name} ({share})", style="bold"))
        texts = token_texts(tok, row.ids.tolist())
        line = Text()
        for number, learned, text in zip(row.ids.tolist(), row.learned, texts, strict=True):
            style = ("bold " if number in special else "") + ("green" if learned else "dim")
            if ids:
                line.append(f"{number:>8}  {'learned' if learned else '':<8} {text!r}\n", style)
            else:
                line.append(text, style)
        print_out(line)
    for name, number in numbers.items():
        print_out(f"{name}: {number}")
    remark(f"{where}; green is learned, dim is read only.")


def _print_statistics(found: dict[str, Any]) -> None:
    from rich.table import Table

    tokens, lengths = found["tokens"], found["lengths"]
    print_out(
        f"{found['documents']:,} documents, {tokens:,} tokens, of which "
        f"{found['learned'] / max(tokens, 1):.1%} are learned\n"
        f"Tokens of a document: {lengths['least']:,} to {lengths['most']:,}, "
        f"mean {lengths['mean']:,.1f}, median {lengths['median']:,.0f}"
    )
    table = Table()
    table.add_column("tokens", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("")
    most = max(found["histogram"].values())
    for edge, count in found["histogram"].items():
        table.add_row(f"to {edge:,}", f"{count:,}", "█" * round(BAR * count / max(most, 1)))
    print_out(table)
    print_out(
        f"Rows of {found['seq_len']:,} tokens: {found['rows_packed']:,} packed, "
        f"{found['full_packed']:.1%} full; {found['examples']:,} padded, "
        f"{found['full_padded']:.1%} full"
    )
    if found["overlong"]:
        print_out(f"{found['overlong']:,} chats and completions are longer than a row.")
