"""Whether patterns read, rename and reverse as theirs do."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import counterpart
import sampling
import torch
from transformers import core_model_loading as loading

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.transforms import WeightConverter, WeightTransform, revert
from flaxen.convert.transforms.naming import name_keys

OFFSET = "renames where the pattern matched; theirs renames the first occurrence of that text"
NESTED = "drops a look-around whole; theirs leaves the end of one with nested groups"

MOST = 600
"""Keys of other transforms of an entry that each of its transforms is tried on."""

CHAINS = 60
"""Keys of an entry that go through all of its transforms, there and back."""

LEADS_BACK = (
    "leaves a name that its reversal would change into one that the transform does not lead back "
    "from; theirs saves it under that"
)

DOUBLED = "leaves a name that is in the checkpoint's form already; theirs doubles what it puts back"

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


def compare_chains(entry: str, transforms: list[Any], result: Any) -> None:
    """Keys through all transforms of an entry in order, and the results back again."""
    ours = [counterpart.ours(t) for t in transforms]
    keys = sampling.keys([p for t in transforms for p in t.source_patterns], doubled=False)
    model = SimpleNamespace(config=None)
    for key in keys[:: max(1, len(keys) // CHAINS)]:
        renamings, converters = _fresh(transforms)
        name, pattern = loading.rename_source_key(key, renamings, converters)
        if pattern is not None:
            continue
        result.chains += 1
        if name_keys([key], ours, {name}, "").plain != {name: key}:
            result.decide(OFFSET if _elsewhere(key, ours) else None, f"{entry}: {key} -> {name}")
            continue
        model._weight_conversions = [
            copy.deepcopy(t) for t in transforms if not isinstance(t, loading.PrefixChange)
        ]
        backwards = [t.reverse_transform() for t in reversed(ours)]
        if any(t.match(name) for t in backwards if isinstance(t, WeightConverter)):
            continue
        [theirs] = loading.revert_weight_conversion(model, {name: torch.zeros(1)})
        [back] = revert({name: LazyTensor()}, ours)
        if theirs != back:
            reason = _why_not_back(name, theirs, back, transforms, ours)
            result.decide(reason, f"{entry}: {name}: theirs {theirs}, ours {back}")


def _why_not_back(
    name: str, theirs: str, back: str, transforms: list[Any], ours: list[WeightTransform]
) -> str | None:
    if loading.rename_source_key(theirs, *_fresh(transforms))[0] != name:
        return LEADS_BACK
    if _elsewhere(name, [t.reverse_transform() for t in reversed(ours)]) or _elsewhere(
        theirs, ours
    ):
        return OFFSET
    # What stays in the old form loads as it is: both systems take a key that is wanted already.
    return (
        DOUBLED if back == name != loading.rename_source_key(name, *_fresh(transforms))[0] else None
    )


def _elsewhere(key: str, transforms: list[WeightTransform]) -> bool:
    """Whether what some transform matches occurs before that place too."""
    for transform in transforms:
        found = transform.match(key)
        if found is not None:
            if key.find(found.text) < len(found.prefix):
                return True
            key = transform.renamed(key)[0]
    return False


def _fresh(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    fresh = [copy.deepcopy(t) for t in transforms]
    return (
        [t for t in fresh if not hasattr(t, "operations")],
        [t for t in fresh if hasattr(t, "operations")],
    )


def _back(theirs: Any) -> list[str]:
    return theirs.reverse_transform().source_patterns


def _patterns(entry: str, theirs: Any, ours: WeightTransform, result: Any) -> None:
    for way, a, b in (
        ("", theirs, ours),
        ("reversed ", theirs.reverse_transform(), ours.reverse_transform()),
    ):
        result.patterns += 1
        same = (a.source_patterns, a.target_patterns) == (b.source_patterns, b.target_patterns)
        if not same:
            torn = any(text.endswith(")") for text in a.target_patterns)
            result.decide(NESTED if torn else None, f"{entry}: {way}{a} is {b}")


def _renaming(entry: str, theirs: Any, ours: WeightTransform, keys: list[str], result: Any) -> None:
    for key in keys:
        result.renames += 1
        want, got = theirs.rename_source_key(key), ours.rename_source_key(key)
        if want == got:
            continue
        same = want[1] == got[1]
        torn = any(t.endswith(")") for t in theirs.target_patterns)
        reason = OFFSET if _elsewhere(key, [ours]) else NESTED if torn else None
        result.decide(reason if same else None, f"{entry}: {ours}: {key}: {want}, ours {got}")
    result.used += theirs.was_used() == ours.was_used()
    if theirs.was_used() != ours.was_used():
        result.fail(f"{entry}: {ours}.was_used() is {ours.was_used()}")
