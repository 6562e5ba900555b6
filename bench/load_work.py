"""One load in a fresh process, timed once its imports are done: WAY FILE|FOLDER [OPTIONS].

Prints JSON: seconds until the model is there, until each page of it has been touched too, peak
anonymous memory, and how much of the files was in the page cache before.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096


def plain(folder: Path, _: argparse.Namespace) -> Callable[[], list[np.ndarray]]:
    """Two threads read the file into fresh memory."""
    path = folder / "model.safetensors"
    size = path.stat().st_size

    def run() -> list[np.ndarray]:
        descriptor = os.open(path, os.O_RDONLY)
        # Pages of its own: NumPy's would be huge ones, which take several times longer to clear.
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        out, half = np.frombuffer(pages, np.uint8), size // 2

        def read(at: int, stop: int) -> None:
            while at < stop:
                at += os.preadv(descriptor, [out[at : min(stop, at + (16 << 20))].data], at)

        threads = [threading.Thread(target=read, args=s) for s in ((0, half), (half, size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [out]

    return run


def ours(folder: Path, options: argparse.Namespace) -> Callable[[], list[np.ndarray]]:
    """`flaxen.load`; each byte of the weights is read once."""
    import jax
    import transformers

    import flaxen
    from flaxen.families import find

    transformers.CONFIG_MAPPING["llama"], transformers.CONFIG_MAPPING["mixtral"]
    jax.device_put(np.zeros(8)).block_until_ready()
    load, _ = flaxen.load, [find(kind) for kind in ("llama", "mixtral")]  # their imports

    def run() -> list[np.ndarray]:
        model = load(folder, mesh=options.mesh, dtype=options.dtype, progress=False)
        jax.block_until_ready(model)
        weights = 2 * model.num_parameters
        assert model.loading.bytes_read == weights, (model.loading.bytes_read, weights)
        shards = (s for x in jax.tree.leaves(model) for s in x.addressable_shards)
        return [np.asarray(s.data) for s in shards if s.replica_id == 0]

    return run


def theirs(folder: Path, _: argparse.Namespace) -> Callable[[], list[np.ndarray]]:
    """Transformers' `from_pretrained`, in the dtype of the file."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM

    assert LlamaForCausalLM and MixtralForCausalLM

    def run() -> list[np.ndarray]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.eval()
        return [p.detach().view(torch.int16).numpy() for p in model.parameters()]

    return run


WAYS = {"plain": plain, "flaxen": ours, "transformers": theirs}


def touch(arrays: Iterable[np.ndarray]) -> int:
    """Look at one byte of each page."""
    return sum(int(a.reshape(-1).view(np.uint8)[::PAGE].sum()) for a in arrays)


def drop(folder: Path) -> None:
    """Ask the system to forget what it has cached of a folder's files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path) -> float:
    """Which part of a file is in the page cache, by 256 samples."""
    found, size = 0, path.stat().st_size
    with path.open("rb") as file:
        for i in range(256):
            try:
                where = size * i // 256
                found += os.preadv(file.fileno(), [bytearray(1)], where, os.RWF_NOWAIT)
            except BlockingIOError:
                pass
    return found / 256


class Peak(threading.Thread):
    """Looks at this process's anonymous memory fifty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.most, self.ended = anonymous(), 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.most = max(self.most, anonymous() - self.before)


def anonymous() -> int:
    """Anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mesh")
    parser.add_argument("--dtype")
    parser.add_argument("--cold", action="store_true", help="drop the page cache first")
    options = parser.parse_args()
    run: Any = WAYS[options.way](options.folder, options)
    if options.cold:
        drop(options.folder)
    before = cached(options.folder / "model.safetensors")
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    arrays = run()
    loaded = time.perf_counter() - start
    touch(arrays)
    touched = time.perf_counter() - start
    peak.ended.set()
    peak.join()
    memory = max(peak.most, anonymous() - peak.before)
    print(json.dumps({"loaded": loaded, "touched": touched, "memory": memory, "cached": before}))


if __name__ == "__main__":
    main()
