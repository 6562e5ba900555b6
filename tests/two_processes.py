"""One of two processes that load and save a model together: PORT INDEX SOURCE TARGET REPORT.

Writes to REPORT the bytes of weights that it read, those of its devices' boxes, and how a save
ends that fails on the second process only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import conftest  # noqa: F401  (sets the environment before jax starts)

os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")

import jax

import flaxen
from flaxen.core.errors import FlaxenError


def main(port: str, index: str, source: str, target: str, report: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=60)
    # Each process is one half of tp: what tp does not cut, both have.
    model = flaxen.load(source, mesh="tp=2,fsdp=4", scan_layers=True)
    assert model.loading is not None
    boxes = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
    )
    model.save(target, max_shard_size="100KB")

    def full(_: int) -> None:
        if index == "1":
            raise OSError(28, "No space left on device")

    try:
        model.save(target, progress=full)
    except FlaxenError as error:
        said = {"read": model.loading.bytes_read, "boxes": boxes, "error": str(error)}
        Path(report).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
