"""What is learned from, and how it is laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Lengths are in tokens, `batch_size` in rows of one micro-batch over all devices.

    A step sees batch_size * accumulation rows of `seq_len` tokens.
    """

    batch_size: int = setting(4, "Rows in one micro-batch, over all devices.", least=1)
    accumulation: int = setting(1, "Micro-batches to one step.", least=1)
    seq_len: int = setting(512, "Tokens in a row.", least=2)
    packing: bool = setting(True, "Several short documents share a row.")
    group_by_length: bool = setting(
        False, "Rows of a batch are about equally long, and so is it; without packing."
    )
    overlong: str = setting(
        "cut", "What becomes of chats longer than a row.", choices=("cut", "drop")
    )
    train_on: str = setting(
        "assistant",
        "What is learned of a chat: its answers, the last one, or all.",
        choices=("assistant", "last", "all"),
    )
    columns: Mapping[str, str] | None = setting(
        None, "Our names of fields and theirs, e.g. prompt=instruction.", flag=list[str]
    )
    token_cache: str = setting(
        "auto", "Folder where tokens stay for later runs; auto: if there are many; none.", free=True
    )
    streaming: bool = setting(False, "Read while training, for what is too much; needs steps.")
    shuffle_buffer: int = setting(10_000, "Documents among which a stream is shuffled.", least=1)
    seed: int = setting(0, "Order of the data, fresh weights, dropout.", least=0, most=2**63 - 1)


def ends_and_rows(settings: Any) -> Iterator[str]:
    """What of a run's data does not go together."""
    if settings.group_by_length and settings.packing:
        yield "group_by_length is for rows of one document each; say packing: false"
    if settings.group_by_length and settings.objective != "causal":
        yield f"group_by_length is for the objective causal, not {settings.objective}"
    if settings.streaming and settings.group_by_length:
        yield "a stream has no group_by_length"
    if settings.streaming and settings.steps is None:
        yield "a stream has no end that is known; say steps"
    buffer = DataSettings.shuffle_buffer
    if settings.shuffle_buffer != buffer and not settings.streaming:
        yield "shuffle_buffer is of streams alone; say streaming, or leave it out"
