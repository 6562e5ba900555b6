"""Which transforms the checkpoints of a kind of model need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flaxen.convert.transforms.renaming import WeightRenaming
from flaxen.convert.transforms.transform import WeightTransform
from flaxen.core.errors import ConfigError

_MAPPINGS: dict[str, list[WeightTransform]] = {}

LEGACY: tuple[WeightTransform, ...] = (
    WeightRenaming("LayerNorm.gamma", "LayerNorm.weight"),
    WeightRenaming("LayerNorm.beta", "LayerNorm.bias"),
    WeightRenaming(".weight_g", ".parametrizations.weight.original0"),
    WeightRenaming(".weight_v", ".parametrizations.weight.original1"),
    WeightRenaming(
        [r"^model\.language_model\.model", r"^language_model\.model\.model"], "model.language_model"
    ),
)
"""What names were called once, for every model; to be applied after all others."""


class Submodel(NamedTuple):
    """A model inside a model, or with an empty path the model itself."""

    path: str
    class_name: str
    model_type: str | None


def register_checkpoint_conversion_mapping(
    name: str, transforms: Sequence[WeightTransform], overwrite: bool = False
) -> None:
    """Remember the transforms of a model type or of a class, which comes before its model type.

    Raises:
        ConfigError: the name has some already, or these are no transforms.
    """
    if name in _MAPPINGS and not overwrite:
        raise ConfigError(
            f"Conversion mapping for {name!r} already exists. Pass overwrite=True to replace it."
        )
    if not isinstance(transforms, Sequence) or not all(
        isinstance(transform, WeightTransform) for transform in transforms
    ):
        raise ConfigError(f"{name!r} takes a list of transforms, not {transforms!r:.80}.")
    _MAPPINGS[name] = [transform.copy() for transform in transforms]


def get_checkpoint_conversion_mapping(name: str) -> list[WeightTransform] | None:
    """Fresh copies of the transforms registered under a name, if there are any."""
    found = _MAPPINGS.get(name)
    return None if found is None else [transform.copy() for transform in found]


def transforms_of(
    submodels: Iterable[tuple[str, str, str | None]], base_model_prefix: str = ""
) -> list[WeightTransform]:
    """The registered transforms of a model and of the models inside it, each in its scope.

    submodels: (path, class name, model type), parents before their children. A model inside
    another of the same class, or of the same model type if that is what it was found by, has none
    of its own: those of the outer one reach it.
    """
    claimed: dict[str, list[str]] = {}
    out: list[WeightTransform] = []
    for path, class_name, model_type in submodels:
        if _reached(path, claimed.get(class_name, ())):
            continue
        found = get_checkpoint_conversion_mapping(class_name)
        names = [class_name]
        if found is None and model_type and not _reached(path, claimed.get(model_type, ())):
            found = get_checkpoint_conversion_mapping(model_type)
            names.append(model_type)
        if found is None:
            continue
        if path:
            scope = _without(path, base_model_prefix)
            found = [transform.scoped(scope, base_model_prefix) for transform in found]
        out += found
        for name in names:
            claimed.setdefault(name, []).append(path)
    return out


def renamings(key_mapping: Mapping[str, str]) -> list[WeightTransform]:
    """The transforms of a `key_mapping`: pattern -> what stands in its place, in order."""
    return [WeightRenaming(source, target) for source, target in key_mapping.items()]


def _reached(path: str, outer: Iterable[str]) -> bool:
    return any(not above or path.startswith(f"{above}.") for above in outer)


def _without(path: str, prefix: str) -> str:
    return "" if path == prefix else path.removeprefix(f"{prefix}.")
