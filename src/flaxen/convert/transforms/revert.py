"""From the names and layouts of a model back to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.transforms.conversion import convert, undo
from flaxen.convert.transforms.converter import WeightConverter
from flaxen.convert.transforms.naming import Entry, Shift
from flaxen.convert.transforms.pattern import natural_key
from flaxen.convert.transforms.registry import LEGACY
from flaxen.convert.transforms.renaming import GroupWeightRename, PrefixChange
from flaxen.convert.transforms.transform import Match, WeightTransform
from flaxen.convert.transforms.view import Applied
from flaxen.core.errors import CheckpointError


def reverted(tensors: Mapping[str, LazyTensor], applied: Applied) -> dict[str, LazyTensor]:
    """The model's tensors under the names and in the layouts of the checkpoint that was loaded.

    Tensors that were not in it go back through the transforms that the others came by.

    Raises:
        CheckpointError: some, but not all of the tensors that were converted together are here.
    """
    out = {key: tensors[name] for name, key in applied.names.items() if name in tensors}
    seen = set(applied.names)
    for done in applied.conversions:
        names = [name for names in done.targets.values() for name in names]
        absent = [name for name in names if name not in tensors]
        seen.update(names)
        if absent and len(absent) < len(names):
            raise CheckpointError(
                f"{done.converter} made {names} together, so they are saved together, but "
                f"{absent} are not here."
            )
        if not absent:
            for key, tensor in undo(done, tensors, applied.config).items():
                _put(out, key, tensor)
    new = {name: tensor for name, tensor in tensors.items() if name not in seen}
    for key, tensor in _through(new, applied.used, applied.config).items():
        _put(out, key, tensor)
    return dict(sorted(out.items(), key=lambda item: natural_key(item[0])))


def revert(
    tensors: Mapping[str, LazyTensor], transforms: Sequence[WeightTransform], config: Any = None
) -> dict[str, LazyTensor]:
    """The tensors of a model that was never loaded, as the transforms of its kind expect them.

    Prefix changes and what names were called once are left out: a new model needs neither.

    Raises:
        CheckpointError: an operation cannot be undone with these tensors.
    """
    kept = [t for t in transforms if not isinstance(t, PrefixChange) and t not in LEGACY]
    return _through(tensors, kept, config)


def _through(
    tensors: Mapping[str, LazyTensor], transforms: Sequence[WeightTransform], config: Any
) -> dict[str, LazyTensor]:
    """Each tensor through at most one reversed converter, then through the reversed renamings.

    A reversal acts only where its transform leads back to the same name.
    """
    pairs = [(transform, transform.reverse_transform()) for transform in reversed(transforms)]
    converters = [(t, r) for t, r in pairs if isinstance(r, WeightConverter)]
    renamings = [(t, r) for t, r in pairs if not isinstance(r, WeightConverter)]
    out: dict[str, LazyTensor] = {}
    entries: dict[tuple[int, str], Entry] = {}
    for name in sorted(tensors, key=natural_key):
        for i, (forward, back) in enumerate(converters):
            found = back.match(name)
            if found is not None and _leads_back(forward, back, found):
                first = found.named(back.target_patterns[0])
                entry = entries.setdefault((i, first), Entry(back, found, Shift()))
                entry.keys.setdefault(found.index, []).append(name)
                break
        else:
            out[name] = tensors[name]
    for entry in entries.values():
        for key, tensor in convert(entry, tensors, config, {})[0].items():
            _put(out, key, tensor)
    return _renamed_back(out, renamings)


def _leads_back(forward: WeightTransform, back: WeightTransform, found: Match) -> bool:
    again = forward.match(found.named(back.target_patterns[0]).replace("*", "0"))
    return again is not None and (again.prefix, again.suffix) == (found.prefix, found.suffix)


def _renamed_back(
    tensors: Mapping[str, LazyTensor],
    pairs: Sequence[tuple[WeightTransform, WeightTransform]],
) -> dict[str, LazyTensor]:
    names = {name: name for name in tensors}
    for forward, back in pairs:
        rename = back.over(list(names.values()))
        for name, now in names.items():
            before, pattern = rename(now)
            if pattern is not None and _same(forward, before, now):
                names[name] = before
    out: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        _put(out, names[name], tensor)
    return out


def _put(out: dict[str, LazyTensor], key: str, tensor: LazyTensor) -> None:
    if key in out:
        raise CheckpointError(
            f"Two tensors would be saved as {key!r}: the transforms that were used at load do not "
            "lead back to different names."
        )
    out[key] = tensor


def _same(forward: WeightTransform, before: str, now: str) -> bool:
    return isinstance(forward, GroupWeightRename) or forward.renamed(before)[0] == now
