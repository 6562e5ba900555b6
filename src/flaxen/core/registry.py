"""Names for interchangeable things."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from flaxen.core.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Things of one kind by name; an unknown name is an error that offers the nearest one.

    Raises:
        ConfigError: for an unknown name, or a name taken twice.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T, *, overwrite: bool = False) -> T:
        if name in self._entries and not overwrite:
            raise ConfigError(
                f"{self.kind} {name!r} is registered already; pass overwrite=True to replace it."
            )
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self._entries:
            near = did_you_mean(str(name), self._entries)
            raise ConfigError(f"Unknown {self.kind} {name!r}.{near}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
