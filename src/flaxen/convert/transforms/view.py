"""A checkpoint under transforms: a lazy mapping with the model's names, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.transforms.absent import complaints
from flaxen.convert.transforms.conversion import Conversion, Shapes, convert
from flaxen.convert.transforms.naming import Entry, name_keys
from flaxen.convert.transforms.pattern import natural_key
from flaxen.convert.transforms.transform import WeightTransform
from flaxen.core.errors import CheckpointError


class Applied(NamedTuple):
    """What became what when a checkpoint was loaded; `reverted` undoes exactly this."""

    names: dict[str, str]
    """The model's name -> the checkpoint's, for tensors that were renamed at most."""
    conversions: tuple[Conversion, ...]
    used: tuple[WeightTransform, ...]
    """The transforms behind both, in their order: for tensors that came later."""
    config: Any

    def instead(self, target: str, source: str) -> Applied:
        """The tensor `source` stands in the checkpoint where `target` did, which is not kept."""
        names = {source if name == target else name: key for name, key in self.names.items()}
        return self._replace(names=names)


class Transformed(Mapping[str, LazyTensor]):
    """The tensors of a checkpoint under the model's names; nothing is read."""

    def __init__(
        self,
        tensors: dict[str, LazyTensor],
        unexpected: list[str],
        errors: dict[str, str],
        applied: Applied,
    ):
        self._tensors = tensors
        self.unexpected = unexpected
        """Keys of the checkpoint that became nothing, or what nothing wants of a converted one."""
        self.errors = errors
        """First target of a conversion that failed -> why."""
        self.applied = applied

    @property
    def used(self) -> tuple[WeightTransform, ...]:
        """The transforms that had a part in any tensor here."""
        return self.applied.used

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def transformed(
    tensors: Mapping[str, LazyTensor],
    transforms: Sequence[WeightTransform],
    wanted: Shapes,
    *,
    config: Any = None,
    base_prefix: str = "model",
) -> Transformed:
    """The checkpoint as the model names and shapes it.

    wanted: the shapes of the model's tensors by name. base_prefix: what a model with a head has
    before the names of the model without one; checkpoints of either become the other.
    A key that is wanted as it is and would become no wanted name stays (a checkpoint that is
    converted already, or in part). Where a wanted tensor is there as it is and could be converted
    from others too, it stands, and the others are unexpected. A conversion that fails gives an
    entry in `errors` with the keys that are absent or odd, and the rest goes on.
    """
    named = name_keys(tensors, transforms, wanted, base_prefix)
    found = {name: tensors[key] for name, key in named.plain.items()}
    unexpected, errors, used = list(named.unexpected), {}, set(named.used)
    done: list[Conversion] = []
    for (by, first), entry in named.entries.items():
        targets = {entry.full(target) for target in entry.targets} & wanted.keys()
        if targets and all(name in found for name in targets):
            unexpected += entry.every_key()
            continue
        try:
            made, record = _converted(entry, tensors, config, wanted)
        except CheckpointError as error:
            errors[first] = str(error)
            continue
        if any(name in found for name in made):
            # Some of it is there as it is: which of the two is meant, the file does not say.
            unexpected += entry.every_key()
            if made.keys() & wanted.keys() <= found.keys():
                continue
        unexpected += [name for name in made if name not in wanted]
        found.update((n, t) for n, t in made.items() if n in wanted and n not in found)
        done.append(record)
        used |= {by, *entry.used}
    applied = Applied(
        named.plain, tuple(done), tuple(t for i, t in enumerate(transforms) if i in used), config
    )
    return Transformed(found, sorted(unexpected, key=natural_key), errors, applied)


def _converted(
    entry: Entry, tensors: Mapping[str, LazyTensor], config: Any, wanted: Shapes
) -> tuple[dict[str, LazyTensor], Conversion]:
    """As `convert`; whatever is wrong, the error names the keys that are absent or odd."""
    try:
        made, record = convert(entry, tensors, config, wanted)
    except CheckpointError as error:
        raise CheckpointError(" ".join([str(error), *complaints(entry, tensors, None)])) from error
    wrong = {n: t.shape for n, t in made.items() if n in wanted and t.shape != tuple(wanted[n])}
    if not wrong:
        return made, record
    name, shape = next(iter(wrong.items()))
    found = complaints(entry, tensors, _count(entry, shape, wanted[name]))
    if not found:
        # The keys are complete: the shape itself is for whoever places the tensors to judge.
        return made, record
    raise CheckpointError(
        f"{name} would be {list(shape)} and should be {list(wanted[name])}. {' '.join(found)}"
    )


def _count(entry: Entry, shape: Sequence[int], wanted: Sequence[int]) -> int | None:
    """How many tensors were wanted, if the shapes differ in the axis that counts them."""
    longest = max(len(keys) for keys in entry.keys.values())
    return next((w for s, w in zip(shape, wanted, strict=False) if longest == s < w), None)
