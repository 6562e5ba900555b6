"""Whether patterns read, rename and reverse as theirs do."""

from __future__ import annotations

import copy
from typing import Any

import counterpart
import sampling

from flaxen.convert.transforms import WeightTransform

OFFSET = "renames where the pattern matched; theirs renames the first occurrence of that text"
NESTED = "drops a look-around whole; theirs leaves the end of one with nested groups"

MOST = 600
"""Keys of other transforms of an entry that each of its transforms is tried on."""

SCOPES = ((None, None), ("vision_tower", "model"))


def compare(entry: str, transforms: list[Any], result: Any) -> None:
    """Every transform of an entry on keys around all patterns of that entry."""
    pairs = [(theirs, counterpart.ours(theirs)) for theirs in transforms]
    sources = [p for theirs, _ in pairs for p in (*theirs.source_patterns, *_back(theirs))]
    keys = sampling.keys(list(dict.fromkeys(sources)))
    keys = keys[:: max(1, len(keys) // MOST)]
    for theirs, ours in pairs:
        _patterns(entry, theirs, ours, result)
        own = sampling.keys([*theirs.source_patterns, *_back(theirs)])
        for scope, base in SCOPES:
            scoped = [f"model.{scope}.{k}" for k in own] + [f"{scope}.{k}" for k in own]
            for a, b in ((theirs, ours), (theirs.reverse_transform(), ours.reverse_transform())):
                a = copy.deepcopy(a)
                a.scope_prefix, a.base_model_prefix = scope, base
                some = [*own, *keys] if scope is None else [*own[:50], *scoped]
                _renaming(entry, a, b.scoped(scope, base), some, result)


def _back(theirs: Any) -> list[str]:
    return theirs.reverse_transform().source_patterns


def _patterns(entry: str, theirs: Any, ours: WeightTransform, result: Any) -> None:
    for way, a, b in (
        ("", theirs, ours),
        ("reversed ", theirs.reverse_transform(), ours.reverse_transform()),
    ):
        result.patterns += 1
        same = (a.source_patterns, a.target_patterns) == (b.source_patterns, b.target_patterns)
        if same:
            continue
        if any(text.endswith(")") for text in a.target_patterns):
            result.decided(NESTED, f"{entry}: {way}{theirs}")
        else:
            result.fail(f"{entry}: {way}patterns of {a} are {b}")


def _renaming(entry: str, theirs: Any, ours: WeightTransform, keys: list[str], result: Any) -> None:
    for key in keys:
        result.renames += 1
        want, got = theirs.rename_source_key(key), ours.rename_source_key(key)
        if want == got:
            continue
        found = ours.match(key)
        text = key[len(found.prefix) : len(key) - len(found.suffix)] if found else ""
        if want[1] == got[1] and found and key.find(text) < len(found.prefix):
            result.decided(OFFSET, f"{entry}: {ours} on {key}")
        elif want[1] == got[1] and any(t.endswith(")") for t in theirs.target_patterns):
            result.decided(NESTED, f"{entry}: {ours} on {key}")
        else:
            result.fail(f"{entry}: {ours} on {key}: theirs {want}, ours {got}")
    result.used += theirs.was_used() == ours.was_used()
    if theirs.was_used() != ours.was_used():
        result.fail(f"{entry}: {ours}.was_used() is {ours.was_used()}")
