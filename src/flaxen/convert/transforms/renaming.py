"""Transforms that only rename."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Self

from flaxen.convert.transforms.transform import Match, Renaming, WeightTransform
from flaxen.core.errors import ConfigError


class WeightRenaming(WeightTransform):
    """Puts the first target where a source pattern matches."""


class GroupWeightRename(WeightRenaming):
    """Renames each source to its own target, if the first source, the guard, is there at all.

    For names that are shifted, such as norm0, norm1 -> norm1, norm2: without a norm0 the
    checkpoint is in order and a norm1 stays. `\\1` to `\\9` stand for the groups of the source.
    `over` looks at all keys of a checkpoint before it decides. `rename_source_key` has no keys but
    those it was given so far: it renames once it has seen the guard.

    Raises:
        ConfigError: not as many targets as sources.
    """

    def __init__(self, source_patterns: Sequence[str], target_patterns: Sequence[str]):
        super().__init__(source_patterns, target_patterns)
        if len(self.source_patterns) != len(self.target_patterns):
            raise ConfigError(
                "GroupWeightRename requires as many targets as sources, but found "
                f"{self.source_patterns} and {self.target_patterns}."
            )
        self._guard_seen = False

    def renamed(self, key: str) -> tuple[str, str | None]:
        """The name that the key has in a checkpoint with the guard."""
        found = self.match(key)
        if found is None:
            return key, None
        target = re.sub(
            r"\\([1-9])",
            lambda digit: found.groups[int(digit[1]) - 1] or "",
            self.target_patterns[found.index],
        )
        return f"{found.prefix}{target}{found.suffix}", self.source_patterns[found.index]

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        found = self.match(source_key)
        self._guard_seen |= found is not None and found.index == 0
        return super().rename_source_key(source_key) if self._guard_seen else (source_key, None)

    def over(self, keys: Iterable[str]) -> Renaming:
        """As `renamed`, but layers without a guard beside layers with one stay if in order.

        A layer is in order if it has a target that is no source, such as norm2.
        """
        ours, theirs = self, self.reverse_transform()
        guarded, in_order = set(), set()
        for key in keys:
            found = ours.match(key)
            if found is None:
                found = theirs.match(key)
                if found is not None:
                    in_order.add(_place(found))
            elif found.index == 0:
                guarded.add(_place(found))
        in_order -= guarded

        def rename(key: str) -> tuple[str, str | None]:
            found = ours.match(key) if guarded else None
            return (key, None) if found is None or _place(found) in in_order else ours.renamed(key)

        return rename

    def _reversed(self) -> GroupWeightRename:
        sources, targets = self._given
        pairs = sorted(zip(targets, sources, strict=True))
        return type(self)([new for new, _ in pairs], [old for _, old in pairs])


class PrefixChange(WeightRenaming):
    """Adds a prefix to every key that lacks it, or takes it off; behind `model_prefix` if given.

    Raises:
        ConfigError: neither or both of `prefix_to_add` and `prefix_to_remove`.
    """

    def __init__(
        self,
        prefix_to_add: str | None = None,
        prefix_to_remove: str | None = None,
        model_prefix: str | None = None,
    ):
        if (prefix_to_add is None) == (prefix_to_remove is None):
            raise ConfigError("You must provide only one of `prefix_to_add` and `prefix_to_remove`")
        self.prefix_to_add, self.prefix_to_remove = prefix_to_add, prefix_to_remove
        self.model_prefix = model_prefix
        outer = rf"{model_prefix}\." if model_prefix else ""
        shown = f"{model_prefix}." if model_prefix else ""
        if prefix_to_add is not None:
            source = rf"^{outer}(?:(?!{prefix_to_add}\.))(.+)"
            super().__init__(source, rf"{shown}{prefix_to_add}.\1")
        else:
            super().__init__(rf"^{outer}{prefix_to_remove}\.(.+)", rf"{shown}\1")

    def _again(self) -> Self:
        return type(self)(self.prefix_to_add, self.prefix_to_remove, self.model_prefix)

    def _reversed(self) -> PrefixChange:
        return type(self)(self.prefix_to_remove, self.prefix_to_add, self.model_prefix)


class LayerPairCollapse(WeightRenaming):
    """Two layers of a checkpoint, mixer and feed-forward, are one of the model.

    It has no opposite: a model that was never loaded through it is saved as it is.
    """

    _parts = re.compile(r"layers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?!\w)")

    def __init__(self):
        super().__init__(r"layers\.(\d+)", r"layers.\1")

    def match(self, key: str) -> Match | None:
        found = super().match(key)
        return found if found is not None and self._parts.search(key) else None

    def renamed(self, key: str) -> tuple[str, str | None]:
        if self.match(key) is None:
            return key, None
        return self._parts.sub(self._collapsed, key, count=1), self.source_patterns[0]

    @staticmethod
    def _collapsed(found: re.Match[str]) -> str:
        layer, odd = divmod(int(found[1]), 2)
        mixer = "mlp" if odd else "self_attn"
        names = {"mixer": mixer, "attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
        return f"layers.{layer}.{names[found[2]]}"

    def _again(self) -> Self:
        return type(self)()

    def _reversed(self) -> LayerPairCollapse:
        return type(self)()


class IndexOffsetWeightRename(WeightRenaming):
    """A renaming whose captured number moves by `offset`."""

    def __init__(
        self,
        source_patterns: str | Sequence[str],
        target_patterns: str | Sequence[str],
        offset: int,
    ):
        super().__init__(source_patterns, target_patterns)
        self.offset = offset

    def match(self, key: str) -> Match | None:
        found = super().match(key)
        if found is None or not found.groups or found.groups[0] is None:
            return None
        return found._replace(groups=(str(int(found.groups[0]) + self.offset), *found.groups[1:]))

    def _again(self) -> Self:
        return type(self)(*self._given, self.offset)

    def _reversed(self) -> IndexOffsetWeightRename:
        sources, targets = self._given
        return type(self)(targets, sources, -self.offset)


def _place(found: Match) -> tuple:
    """The layer that a group of names belongs to."""
    return found.prefix, found.groups
