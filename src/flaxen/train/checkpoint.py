"""Checkpoints of a run, written by orbax in the background: complete or not there at all.

A checkpoint is a folder `step_00000010` with `state`, every array by path, and `about`: settings,
step, place in the data, seed and runtime. It is read back onto any mesh.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.errors import CheckpointError
from flaxen.core.tree import paths

FORMAT = 2
METRIC = "eval_loss"
REMOVE = "Remove it to go on from the one before."


class Checkpoints:
    """The checkpoints in a folder.

    settings: what a run that goes on must have in common with the one that wrote them. keep: how
    many of the newest stay (0: all); keep_best: how many of those with the least loss on held-out
    data stay besides.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], keep: int = 2, keep_best: int = 0
    ):
        self.folder, self.settings = folder.absolute(), dict(settings)
        self.keep, self.keep_best = keep, keep_best
        self._opened: Any = None

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, in order.

        Raises:
            CheckpointError: they are of an older version, which wrote `step-00000010`.
        """
        if self._opened is not None:
            return sorted(self._opened.all_steps())
        if old := sorted(self.folder.glob("step-*")):
            raise CheckpointError(
                f"{old[-1]} was written by an older version, in a format that is not read any "
                "more. Train into another folder; weights that were exported load as ever."
            )
        if not any(self.folder.glob("step_*")):
            return []
        return sorted(found.step for found in _names().find_all(self.folder))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08}"

    def save(
        self, step: int, state: Any, about: Mapping[str, Any] | None = None, loss: float = math.inf
    ) -> Path:
        """Begin to write a checkpoint, and return as soon as its arrays may change again; then
        remove those that need not stay. loss: on held-out data, if it is known.

        Raises:
            CheckpointError: this one, or the one before, cannot be written.
        """
        import orbax.checkpoint as ocp

        arrays = paths(state)
        known = {"format": FORMAT, "step": step, "settings": self.settings, **(about or {})}
        known["checksum"] = checksum(arrays)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(known)
        )
        try:
            self._manager().save(step, args=args, metrics={METRIC: loss}, force=True)
        except (OSError, ValueError) as error:
            raise _unwritten(self.folder, error) from error
        return self.path(step)

    def wait(self) -> None:
        """Until all that was begun is on the disk.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._opened is None:
            return
        try:
            self._opened.wait_until_finished()
        except (OSError, ValueError) as error:
            raise _unwritten(self.folder, error) from error

    def close(self) -> None:
        """`wait`, and give up what writes in the background."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            opened.wait_until_finished()
        except (OSError, ValueError) as error:
            raise _unwritten(self.folder, error) from error
        finally:
            opened.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            # What was begun is still finished; that it fails too is no news.
            with contextlib.suppress(CheckpointError):
                self.close()

    def about(self, step: int | None = None) -> dict[str, Any]:
        """What a checkpoint says of itself, by default the last one.

        Raises:
            CheckpointError: it is damaged, or was written with other settings; all differences are
                listed.
        """
        import orbax.checkpoint as ocp
        from etils import epath

        self.wait()
        target = self.path(self._last() if step is None else step)
        with _damaged(target):
            about = ocp.JsonCheckpointHandler().restore(epath.Path(target) / "about")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise CheckpointError(f"{target} is of another format; expected {FORMAT}.")
        if not isinstance(about.get("settings"), dict):
            raise CheckpointError(f"{target} does not say its settings. {REMOVE}")
        _compare(target, about["settings"], self.settings)
        return about

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """(step, state) of the last checkpoint or the given one, each array laid out as in `like`.

        Raises:
            CheckpointError: as `about` does, or it holds other arrays, or other numbers.
        """
        import orbax.checkpoint as ocp
        from etils import epath

        step = self._last() if step is None else step
        about = self.about(step)
        target, wanted = self.path(step), paths(like)
        abstract = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in wanted.items()
        }
        _same_arrays(target, _stored(target), abstract)
        with _damaged(target), contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
            folder = epath.Path(target) / "state"
            arrays = reader.restore(folder, args=ocp.args.StandardRestore(abstract))
        # Its files have no checksums of their own.
        if "checksum" in about and about["checksum"] != checksum(arrays):
            raise CheckpointError(f"{target} holds other numbers than were written. {REMOVE}")
        leaves = [arrays[path] for path in wanted]
        return step, jax.tree.unflatten(jax.tree.structure(like), leaves)

    def dtypes(self, part: str) -> dict[str, Any]:
        """The dtype of each array of a part of the last checkpoint, by its path in there."""
        target, start = self.path(self._last()), f"{part}."
        stored = _stored(target)
        return {
            path.removeprefix(start): jnp.dtype(x.dtype)
            for path, x in stored.items()
            if path.startswith(start)
        }

    def _last(self) -> int:
        if not (steps := self.steps()):
            raise CheckpointError(f"{self.folder} holds no checkpoint.")
        return steps[-1]

    def _manager(self) -> Any:
        """What writes, and removes; made when it is first needed, as is the folder."""
        if self._opened is None:
            import orbax.checkpoint as ocp
            from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

            best = policy.BestN(get_metric_fn=lambda m: m[METRIC], reverse=True, n=self.keep_best)
            stay = [policy.LatestN(self.keep), *([best] if self.keep_best else [])]
            options = ocp.CheckpointManagerOptions(
                step_name_format=_names(),
                cleanup_tmp_directories=True,
                preservation_policy=(
                    policy.AnyPreservationPolicy(stay) if self.keep else policy.PreserveAll()
                ),
            )
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened


def _names() -> Any:
    import orbax.checkpoint as ocp

    return ocp.step.standard_name_format(step_prefix="step", step_format_fixed_length=8)


def _stored(target: Path) -> dict[str, Any]:
    """Shape and dtype of every array of a checkpoint, by path."""
    import orbax.checkpoint as ocp
    from etils import epath

    with _damaged(target), contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
        return reader.metadata(epath.Path(target) / "state").tree


class _damaged:
    """Whatever a file that is damaged makes its readers say, as one error."""

    def __init__(self, target: Path):
        self.target = target

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            return
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{self.target} cannot be read: {said}. {REMOVE}") from error


def _unwritten(folder: Path, error: Exception) -> CheckpointError:
    """In the words of the system, if its number is anywhere in what a file's writer says."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    said = os.strerror(int(number[1])) if number else " ".join(str(error).split())[:300]
    return CheckpointError(
        f"A checkpoint in {folder} cannot be written: {said}. Those before it are whole."
    )


def _compare(target: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(dict(wanted)))
    different = [
        f"  {key}: found {found.get(key)!r}, expected {wanted.get(key)!r}"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]
    if different:
        raise CheckpointError(
            f"{target} was written by a run that differs from this one:\n"
            + "\n".join(different)
            + "\nResume with the same settings, or train into another folder."
        )


def _same_arrays(target: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if set(stored) != set(wanted):
        odd = sorted(set(stored) ^ set(wanted))
        raise CheckpointError(f"{target} and this run differ in the arrays {odd[:5]}.")
    for path, x in wanted.items():
        have = stored[path]
        if tuple(have.shape) != tuple(x.shape) or jnp.dtype(have.dtype) != x.dtype:
            raise CheckpointError(
                f"{path} is {have.dtype}{tuple(have.shape)} in {target}, expected "
                f"{x.dtype}{tuple(x.shape)}."
            )


def checksum(tree: Any) -> str:
    """A number made of a model's structure and every weight's bits; the same on any mesh."""
    sums = jax.device_get([_bits(leaf) for leaf in jax.tree.leaves(tree)])
    words = [
        f"{p}{x.shape}{x.dtype}{n}" for (p, x), n in zip(paths(tree).items(), sums, strict=True)
    ]
    words.append(str(jax.tree.structure(tree)))
    return f"{zlib.crc32(' '.join(words).encode()):08x}"


@jax.jit
def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    words = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)
