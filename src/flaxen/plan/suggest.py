"""The nearest plan that fits, when the one that was asked for does not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from flaxen.core.errors import FlaxenError
from flaxen.plan.budget import Budget
from flaxen.plan.job import Job
from flaxen.shard import plan_named

TRIED = 200
"""Plans that are estimated at most; each takes some milliseconds."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One step away from a plan: what it is called, what it replaces, and how far away it is.

    Changes of how a step is computed are near, those of what is computed farther, more devices the
    farthest.
    """

    words: str
    fields: dict[str, Any]
    distance: float


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A plan that fits by its budget, and how it differs from what was asked for."""

    job: Job
    changes: tuple[str, ...]
    budget: Budget


def suggestions(
    job: Job, memory: int, estimate: Callable[[Job], Budget], count: int = 3
) -> list[Suggestion]:
    """The nearest plans whose budget is at most `memory` bytes, nearest first."""
    found: list[Suggestion] = []
    for changes in itertools.islice(_nearest(job), TRIED):
        fields = {key: value for change in changes for key, value in change.fields.items()}
        try:
            other = dataclasses.replace(job, **fields)
            budget = estimate(other)
        except FlaxenError:  # rows that do not divide, axes that a plan does not cut
            continue
        if budget.total <= memory:
            found.append(Suggestion(other, tuple(change.words for change in changes), budget))
            if len(found) == count:
                break
    return found


def _nearest(job: Job) -> Iterator[tuple[Change, ...]]:
    """Combinations of changes, one of each kind at most, by their distance together."""
    kinds = [kind for kind in (_recompute(job), _smaller(job), _meshes(job), _cheaper(job)) if kind]
    choices = itertools.product(*([None, *kind] for kind in kinds))
    every = [tuple(change for change in choice if change is not None) for choice in choices]
    more = [(*changes, more) for changes in every for more in _more_devices(job)]
    total = lambda changes: sum(change.distance for change in changes)
    return iter(sorted((c for c in (*every, *more) if c), key=total))


def _recompute(job: Job) -> list[Change]:
    if job.train == "none" or job.remat in ("block", "nothing"):
        return []
    found = [Change("--remat block", {"remat": "block"}, 1.2)]
    if job.remat in (None, "everything"):
        lighter = "dots_with_no_batch_dims"
        found.append(Change(f"--remat {lighter}", {"remat": lighter}, 1.0))
    return found


def _smaller(job: Job) -> list[Change]:
    """The same step in more micro-batches, or, in inference, fewer rows."""
    found, pieces = [], 2
    while job.batch % pieces == 0 and pieces <= 64:
        if job.train == "none":
            rows = job.batch // pieces
            found.append(Change(f"--batch {rows}", {"batch": rows}, 2.0 * pieces**0.5))
        elif pieces > job.accumulation:
            words = f"--accumulation {pieces}"
            found.append(Change(words, {"accumulation": pieces}, 1 + 0.1 * pieces**0.5))
        pieces *= 2
    return found


def _meshes(job: Job) -> list[Change]:
    """Other ways to lay the same devices out, along the axes that the plan cuts weights by."""
    axes = [axis for axis in ("dp", "fsdp", "tp") if axis in plan_named(job.plan).mesh_axes()]
    kept = {a: n for a, n in job.mesh.items() if a not in ("dp", "fsdp", "tp") and n > 1}
    count = job.devices
    for size in kept.values():
        count //= size
    found = []
    for sizes in _factorings(count, len(axes)):
        mesh = {a: n for a, n in zip(axes, sizes, strict=True) if n > 1} | kept
        if mesh and mesh != {a: n for a, n in job.mesh.items() if n > 1}:
            text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            tensor = mesh.get("tp", 1)
            # Whole products between the chips of one host are the cheap ones.
            far = 1.5 + (0.2 if tensor <= 8 else 1.5) * (tensor > 1)
            found.append(Change(f"--mesh {text}", {"mesh": mesh}, far))
    return found


def _factorings(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (count,)
        return
    for first in (n for n in range(1, count + 1) if count % n == 0):
        for rest in _factorings(count // first, axes - 1):
            yield first, *rest


def _cheaper(job: Job) -> list[Change]:
    """Less precise, with less to remember, or fewer weights that are trained."""
    found = []
    if job.computing.itemsize > 2:
        found.append(Change("--dtype bfloat16", {"dtype": "bfloat16"}, 2.5))
    if job.train == "full":
        if job.optimizer == "adamw":
            found.append(Change("--optimizer lion", {"optimizer": "lion"}, 4.0))
        found.append(Change("--train lora", {"train": "lora"}, 5.0))
    return found


def _more_devices(job: Job) -> list[Change]:
    """More of the same, along the axis that cuts most of what is held."""
    axis = "fsdp" if "fsdp" in plan_named(job.plan).mesh_axes() else next(iter(job.mesh))
    found = []
    for factor in (2, 4, 8, 16):
        mesh = {**job.mesh, axis: job.mesh.get(axis, 1) * factor}
        text = ",".join(f"{a}={n}" for a, n in mesh.items())
        devices = job.devices * factor
        words = f"--mesh {text} on {devices} devices"
        found.append(Change(words, {"mesh": mesh}, 8.0 + 2 * factor**0.5))
    return found
