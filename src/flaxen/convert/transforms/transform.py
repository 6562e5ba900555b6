"""What a transform is: patterns, a scope, and how a key is renamed under them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

from flaxen.convert.transforms.pattern import branch, compile_sources, source_text, target_text
from flaxen.core.errors import ConfigError

Renaming = Callable[[str], tuple[str, str | None]]
"""A key -> its new name, and the source pattern that matched or None."""


class Match(NamedTuple):
    """Where a transform applies to a key."""

    source: int
    """Index of the source pattern."""
    prefix: str
    text: str
    suffix: str
    groups: tuple[str | None, ...]
    """What the groups of that pattern took."""

    def fill(self, target: str) -> str:
        """A target pattern with what the first group took."""
        return target.replace(r"\1", self.groups[0] or "") if self.groups else target

    def named(self, target: str) -> str:
        return f"{self.prefix}{self.fill(target)}{self.suffix}"


class WeightTransform:
    """A rule from the names of a checkpoint to those of a model; subclasses say what it does.

    With a `scope_prefix` it acts only on keys under that prefix, with or without the
    `base_model_prefix` before it, and its patterns see what follows.

    Raises:
        ConfigError: no pattern, or one that is no regular expression, or a back-reference has
            nothing behind it.
    """

    scope_prefix: str | None = None
    base_model_prefix: str | None = None

    def __init__(self, source_patterns: str | Sequence[str], target_patterns: str | Sequence[str]):
        self._given = _as_list(source_patterns), _as_list(target_patterns)
        sources, targets = self._given
        texts = [target_text(target) for target in targets]
        groups = {group for _, group in texts if group is not None}
        if len(groups) > 1:
            raise ConfigError(
                f"Multiple different capturing groups found in target_patterns: {groups}. All "
                "target patterns must use the same capturing group pattern."
            )
        group = next(iter(groups), None)
        pairs = targets if len(targets) == len(sources) else [None] * len(sources)
        self.target_patterns = [text for text, _ in texts]
        self.source_patterns = [
            source_text(s, t, group) for s, t in zip(sources, pairs, strict=True)
        ]
        self._regex = compile_sources(self.source_patterns)
        self._groups = [re.compile(branch(p)).groups for p in self.source_patterns]
        self._used = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("source_patterns", "target_patterns") and hasattr(self, name):
            raise ConfigError(
                f"Cannot assign to field {name}: what a transform matches is settled when it is "
                "made. Make another one."
            )
        super().__setattr__(name, value)

    def match(self, key: str) -> Match | None:
        """The leftmost place where a source pattern matches."""
        outer = 0 if self.scope_prefix is None else self._outside(key)
        if outer is None:
            return None
        found = self._regex.search(key[outer:])
        if found is None or found.lastgroup is None:
            return None
        index = int(found.lastgroup[1:])
        own = self._regex.groupindex[found.lastgroup]
        groups = found.groups()[own : own + self._groups[index]]
        start, stop = found.span()
        return Match(index, key[: outer + start], found[0], key[outer + stop :], groups)

    def renamed(self, key: str) -> tuple[str, str | None]:
        """The new name, and the source pattern that matched or None. Remembers nothing."""
        found = self.match(key)
        if found is None:
            return key, None
        return found.named(self.target_patterns[0]), self.source_patterns[found.source]

    def over(self, keys: Iterable[str]) -> Renaming:
        """How it renames each of these keys, which all come from one checkpoint."""
        if self.scope_prefix is not None:
            return self.renamed
        # Most keys match nothing: the plain search is quicker to say so.
        search, renamed = self._regex.search, self.renamed
        return lambda key: renamed(key) if search(key) else (key, None)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The new name, and the source pattern that matched or None."""
        name, pattern = self.renamed(source_key)
        self._used |= pattern is not None
        return name, pattern

    def was_used(self) -> bool:
        """Whether `rename_source_key` ever matched."""
        return self._used

    def reverse_transform(self) -> WeightTransform:
        """The transform from the names of the model back to those of the checkpoint."""
        return self._within(self._reversed(), self.scope_prefix, self.base_model_prefix)

    def scoped(self, scope_prefix: str | None, base_model_prefix: str | None) -> Self:
        """A fresh transform that acts under a prefix only."""
        return self._within(self._again(), scope_prefix, base_model_prefix)

    def copy(self) -> Self:
        """A transform that was never used."""
        return self.scoped(self.scope_prefix, self.base_model_prefix)

    def _again(self) -> Self:
        return type(self)(*self._given)

    def _reversed(self) -> WeightTransform:
        sources, targets = self._given
        return type(self)(targets, sources)

    @staticmethod
    def _within(transform, scope_prefix, base_model_prefix):
        transform.scope_prefix = scope_prefix
        transform.base_model_prefix = base_model_prefix
        return transform

    def _outside(self, key: str) -> int | None:
        """The length of the prefix that no pattern sees; None if the key is out of scope."""
        scope = f"{self.scope_prefix}." if self.scope_prefix else ""
        base = f"{self.base_model_prefix}." if self.base_model_prefix else ""
        if key.startswith(base + scope):
            return len(base + scope)
        return len(scope) if key.startswith(scope) else None

    def __repr__(self) -> str:
        scope = f", scope {self.scope_prefix!r}" if self.scope_prefix is not None else ""
        return f"{type(self).__name__}({self.source_patterns} -> {self.target_patterns}{scope})"


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    found = [patterns] if isinstance(patterns, str) else list(patterns or ())
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise ConfigError(f"A transform takes a pattern or several, not {patterns!r}.")
    return found
