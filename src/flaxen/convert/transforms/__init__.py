"""Transforms: rules that rename and convert the keys of a checkpoint, both ways."""

from __future__ import annotations

from flaxen.convert.transforms.converter import WeightConverter
from flaxen.convert.transforms.pattern import GlobAlternation, natural_key
from flaxen.convert.transforms.registry import (
    LEGACY,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
    renamings,
    transforms_of,
)
from flaxen.convert.transforms.renaming import (
    GroupWeightRename,
    IndexOffsetWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightRenaming,
)
from flaxen.convert.transforms.revert import revert, reverted
from flaxen.convert.transforms.transform import WeightTransform
from flaxen.convert.transforms.view import Applied, Transformed, transformed

__all__ = [
    "LEGACY",
    "Applied",
    "GlobAlternation",
    "GroupWeightRename",
    "IndexOffsetWeightRename",
    "LayerPairCollapse",
    "PrefixChange",
    "Transformed",
    "WeightConverter",
    "WeightRenaming",
    "WeightTransform",
    "get_checkpoint_conversion_mapping",
    "natural_key",
    "register_checkpoint_conversion_mapping",
    "renamings",
    "revert",
    "reverted",
    "transformed",
    "transforms_of",
]
