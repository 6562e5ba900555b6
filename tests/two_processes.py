"""One of two processes that load and save a model together: PORT INDEX SOURCE TARGET.

Prints how many bytes of weights it read, and those of the boxes of its own devices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import conftest  # noqa: F401  (sets the environment before jax starts)

os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")

import jax

import flaxen


def main(port: str, index: str, source: str, target: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=20)
    model = flaxen.load(source, mesh="fsdp=4,tp=2")
    assert model.loading is not None
    boxes = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
    )
    try:
        model.save(target, max_shard_size="20KB")
    except flaxen.core.errors.CheckpointError as error:
        print("refused:", error)
    print(model.loading.bytes_read, boxes, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
