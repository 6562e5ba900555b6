"""From the names and layouts of a model back to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.transforms.conversion import convert, undo
from flaxen.convert.transforms.converter import WeightConverter
from flaxen.convert.transforms.naming import Entry, Shift
from flaxen.convert.transforms.pattern import natural_key
from flaxen.convert.transforms.registry import LEGACY
from flaxen.convert.transforms.renaming import PrefixChange
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
    made = {name for done in applied.conversions for name in done.every_target()}
    known = made | applied.names.keys()
    new = {name: tensor for name, tensor in tensors.items() if name not in known}
    back = _through(new, applied.used, applied.config)
    for done in applied.conversions:
        names = done.every_target()
        if not back.keys().isdisjoint(done.every_key()):
            # Tensors of its kind came later, such as an expert that was absent: all go together.
            new |= {name: tensors[name] for name in names if name in tensors}
            continue
        absent = [name for name in names if name not in tensors]
        if absent and len(absent) < len(names):
            raise CheckpointError(
                f"{done.converter} made {names} together, so they are saved together, but "
                f"{absent} are not here."
            )
        if not absent:
            for key, tensor in undo(done, tensors, applied.config).items():
                _put(out, key, tensor)
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
    if not tensors:
        return {}
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
                entry.keys.setdefault(found.source, []).append(name)
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
    before = _names_back(tensors, pairs, keep_doubles=False)
    if len(set(before.values())) < len(before):
        before = _names_back(tensors, pairs, keep_doubles=True)
    out: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        _put(out, before[name], tensor)
    return out


def _names_back(
    names: Iterable[str],
    pairs: Sequence[tuple[WeightTransform, WeightTransform]],
    keep_doubles: bool,
) -> dict[str, str]:
    out = {name: name for name in names}
    for forward, back in pairs:
        rename = back.over(list(out.values()))
        for name, now in out.items():
            before, pattern = rename(now)
            if pattern is None or forward.renamed(before)[0] != now:
                continue
            if keep_doubles or not _in_old_form(now, forward, back):
                out[name] = before
    return out


def _in_old_form(name: str, forward: WeightTransform, back: WeightTransform) -> bool:
    """Whether what would be put back is around its place already: encoder.(encoder.)layers."""
    old, new = forward.match(name), back.match(name)
    return (
        old is not None
        and new is not None
        and len(old.text) > len(new.text)
        and len(old.prefix) <= len(new.prefix)
        and len(old.suffix) <= len(new.suffix)
    )


def _put(out: dict[str, LazyTensor], key: str, tensor: LazyTensor) -> None:
    if key in out:
        raise CheckpointError(
            f"Two tensors would be saved as {key!r}: the transforms that were used at load do not "
            "lead back to different names."
        )
    out[key] = tensor
