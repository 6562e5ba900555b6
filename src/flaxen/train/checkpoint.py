"""Checkpoints of a run: safetensors and JSON, complete or not there at all.

A checkpoint is a folder `step-00000010` with `run.json` and, for each process,
`state-<process>.safetensors`, in which a tensor
`path|0:4,8:16` is that box of the array at `path`. So a state is saved from the shards that a
process has, and read back onto any mesh.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import CheckpointError
from flaxen.core.tree import paths
from flaxen.train.files import Boxes, read_boxes, write_tensors

RUN = "run.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder. `settings` is what a run that goes on must have in common with
    the one that wrote them.
    """

    folder: Path
    settings: Mapping[str, Any]
    keep: int = 2

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, in order."""
        names = [_STEP.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{RUN}")]
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def save(self, step: int, state: Any) -> Path:
        """Write a checkpoint beside its place, move it there, then remove the oldest ones."""
        target, aside = self.path(step), self.folder / f"step-{step:08}.partial"
        if jax.process_index() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        _together(f"flaxen-begin-{step}")
        write_tensors(aside / f"state-{jax.process_index():05}.safetensors", _boxes(state))
        _together(f"flaxen-end-{step}")
        if jax.process_index() == 0:
            about = {"format": FORMAT, "step": step, "processes": jax.process_count()}
            _write_json(aside / RUN, {**about, "settings": dict(self.settings)})
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            _sync(self.folder)
            for old in self.steps()[: -self.keep] if self.keep else []:
                shutil.rmtree(self.path(old))
        return target

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """(step, state) of the last checkpoint or the given one, each array laid out as in `like`.

        Raises:
            CheckpointError: the checkpoint is damaged, or was written with other settings; all
                differences are listed.
        """
        step = self.steps()[-1] if step is None else step
        folder = self.path(step)
        about = _read_json(folder / RUN)
        if about.get("format") != FORMAT:
            raise CheckpointError(f"{folder} has format {about.get('format')}, expected {FORMAT}.")
        self._compare(folder, about["settings"])
        files = [folder / f"state-{i:05}.safetensors" for i in range(about["processes"])]
        boxes, leaves = read_boxes(files), paths(like)
        if set(boxes) != set(leaves):
            odd = sorted(set(boxes) ^ set(leaves))
            raise CheckpointError(f"{folder} and this run differ in the arrays {odd[:5]}.")
        arrays = [_restored(path, leaf, boxes[path]) for path, leaf in leaves.items()]
        return step, jax.tree.unflatten(jax.tree.structure(like), arrays)

    def dtypes(self, part: str) -> dict[str, np.dtype]:
        """The dtype of each array of a part of the last checkpoint, by its path in there."""
        folder = self.path(self.steps()[-1])
        boxes = read_boxes(sorted(folder.glob("state-*.safetensors")))
        start = f"{part}."
        return {p.removeprefix(start): x.dtype for p, x in boxes.items() if p.startswith(start)}

    def _compare(self, folder: Path, found: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps(dict(self.settings)))
        different = [
            f"  {key}: found {found.get(key)!r}, expected {wanted.get(key)!r}"
            for key in sorted({*found, *wanted})
            if found.get(key) != wanted.get(key)
        ]
        if different:
            raise CheckpointError(
                f"{folder} was written by a run that differs from this one:\n"
                + "\n".join(different)
                + "\nResume with the same settings, or train into another folder."
            )


def checksum(tree: Any) -> str:
    """A number made of a model's structure and every weight's bits; the same on any mesh."""
    sums = jax.jit(lambda tree: [_bits(leaf) for leaf in jax.tree.leaves(tree)])(tree)
    words = [
        f"{p}{x.shape}{x.dtype}{n}" for (p, x), n in zip(paths(tree).items(), sums, strict=True)
    ]
    words.append(str(jax.tree.structure(tree)))
    return f"{zlib.crc32(' '.join(words).encode()):08x}"


def _bits(x: jax.Array) -> jax.Array:
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    words = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


def _boxes(state: Any) -> dict[str, np.ndarray]:
    """What this process has to write: each box of each array once among all processes."""
    return {
        f"{path}|{_box_name(shard.index, leaf.shape)}": np.asarray(shard.data)
        for path, leaf in paths(state).items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    }


def _box_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def _restored(path: str, like: jax.Array, boxes: Boxes) -> jax.Array:
    if boxes.shape != like.shape or boxes.dtype != like.dtype:
        raise CheckpointError(
            f"{path} is {boxes.dtype}{boxes.shape} in the checkpoint, "
            f"expected {like.dtype}{like.shape}."
        )
    return jax.make_array_from_callback(like.shape, like.sharding, boxes.read)


def _together(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _sync(folder: Path) -> None:
    """Make a rename in this folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
