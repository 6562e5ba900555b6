"""Datasets of the Hugging Face hub, and folders laid out like them, through `datasets`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

from flaxen.core.errors import InputError
from flaxen.train.data.files import Found, without_nothing


@dataclasses.dataclass(frozen=True)
class HubData:
    """A dataset's name and which of its configurations, splits and revisions."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None


def hub_data(name: str, **more: str) -> HubData:
    """`owner/name`, `owner/name:split`, `owner/name:config:split`, each perhaps with `@revision`
    behind the name; more: the same, said by themselves.
    """
    match = re.fullmatch(r"([^:@]+)(?:@([^:]+))?(?::([^:]+))?(?::([^:]+))?", name)
    if match is None:
        raise InputError(
            f"'hf:{name}' names no dataset; expected hf:owner/name@revision:config:split, of which "
            "only owner/name must be there."
        )
    name, revision, first, second = match.groups()
    config, split = (first, second) if second else (None, first)
    found = {"config": config, "split": split, "revision": revision}
    return HubData(name, **({k: v for k, v in found.items() if v} | more))


def opened(data: HubData, streaming: bool = False) -> Any:
    """The dataset, downloaded once or read from afar. It is data only: a dataset that is a script
    is refused.

    Raises:
        InputError: there is none, or it has no such split.
    """
    import datasets  # type: ignore[import-not-found]

    try:
        return datasets.load_dataset(
            data.name,
            data.config,
            split=data.split,
            revision=data.revision,
            streaming=streaming,
        )
    except Exception as error:  # each kind of absence raises another kind
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"The dataset {data.name!r} cannot be read: {why}") from error


def hub_documents(data: HubData, streaming: bool = False) -> Iterator[Found]:
    """Every row.

    Raises:
        InputError: there is none, or reading fails on the way.
    """
    rows = iter(opened(data, streaming))
    for number in itertools.count():
        where = f"{data.name}:{data.split}[{number}]"
        try:
            row = next(rows, None)
        except Exception as error:  # each kind of network and file raises another kind
            raise InputError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
        if row is None:
            return
        yield where, without_nothing(row)


def hub_fingerprint(data: HubData) -> str:
    """What changes when the dataset does."""
    return opened(data)._fingerprint
