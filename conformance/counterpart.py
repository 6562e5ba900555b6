"""Our transform for each of theirs, made with the arguments that theirs was made with."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from transformers import conversion_mapping
from transformers import core_model_loading as theirs

from flaxen.convert import ops
from flaxen.convert.transforms import (
    GroupWeightRename,
    IndexOffsetWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

TRANSFORMS: dict[str, type[WeightTransform]] = {
    "WeightRenaming": WeightRenaming,
    "WeightConverter": WeightConverter,
    "GroupWeightRename": GroupWeightRename,
    "PrefixChange": PrefixChange,
    "LayerPairCollapse": LayerPairCollapse,
    "Inkling2IndexOffsetWeightRename": IndexOffsetWeightRename,
}

RENAMED_OPS = {
    "Inkling2UnpadVocab": "UnpadVocab",
    "Inkling2LoopMergeMessageQueries": "MergeMessageQueries",
}

NOT_COVERED = {
    "Inkling2LoopDequantizeExperts": "reads packed NVFP4 and MXFP8 experts of one checkpoint",
}


class NotCovered(ops.IdentityOp):
    """Stands where one of their operations has no counterpart."""


_GIVEN: dict[int, tuple[Any, dict[str, Any]]] = {}
"""Identity of a transform of theirs -> it, kept alive, and the arguments that it was made with."""


def their_mapping() -> dict[str, list[Any]]:
    """Their whole table, made while the arguments of every transform are noted down."""
    for name in TRANSFORMS:
        _note_arguments(getattr(theirs, name))
    conversion_mapping.get_checkpoint_conversion_mapping("legacy")
    return conversion_mapping._checkpoint_conversion_mapping_cache


def _note_arguments(cls: type) -> None:
    made = cls.__init__
    signature = inspect.signature(made)

    @functools.wraps(made)
    def init(self, *args, **kwargs):
        # Before the call, which changes the lists that it is given.
        bound = copy.deepcopy(signature.bind(None, *args, **kwargs).arguments)
        made(self, *args, **kwargs)
        # A subclass comes here after its base class: the arguments of the outermost call stay.
        _GIVEN[id(self)] = self, dict(list(bound.items())[1:])

    cls.__init__ = init


def _arguments(transform: Any) -> dict[str, Any]:
    """Those of the call that made it, or for a copy what it keeps of them."""
    if id(transform) in _GIVEN:
        return _GIVEN[id(transform)][1]
    kept = {
        "source_patterns": transform.source_patterns,
        "target_patterns": transform._original_target_patterns,
    }
    more = ("operations",) if hasattr(transform, "operations") else ()
    return kept | {name: getattr(transform, name) for name in more}


def ours(transform: Any) -> WeightTransform:
    """Our counterpart of one of their transforms."""
    given = dict(_arguments(transform))
    given.pop("force_cpu", None)
    if "operations" in given:
        given["operations"] = [our_op(op) for op in given["operations"]]
    return TRANSFORMS[type(transform).__name__](**given)


def our_op(op: Any) -> ops.ConversionOps:
    name = type(op).__name__
    if name in NOT_COVERED:
        return NotCovered()
    return getattr(ops, RENAMED_OPS.get(name, name))(**vars(op))


def uncovered(transform: Any) -> bool:
    """Whether a converter of theirs holds an operation that has no counterpart."""
    return any(type(op).__name__ in NOT_COVERED for op in getattr(transform, "operations", ()))
