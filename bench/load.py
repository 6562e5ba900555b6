"""Loading a large checkpoint, side by side with a plain two-thread read of its file.

    python bench/load.py [--gigabytes 2.2] [--folder DIR] [--tries 3]

Every measurement is the first load of a fresh process; the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

WAYS = ["plain read", "one device", "8 devices", "one device, float32", "own folder"]


def layer(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    square = {f"self_attn.{n}_proj.weight": (width, width) for n in "qo"}
    narrow = {f"self_attn.{n}_proj.weight": (width // 4, width) for n in "kv"}
    wide = {f"mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
    norms = {f"{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
    return square | narrow | wide | norms | {"mlp.down_proj.weight": (width, inner)}


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama of about this size in bfloat16."""
    width, inner, vocab = 2048, 5632, 32000
    each = sum(2 * int(np.prod(s)) for s in layer(width, inner).values())
    count = max(1, round((gigabytes * 1e9 - 4 * vocab * width) / each))
    names = {
        f"model.layers.{i}.{n}": s for i in range(count) for n, s in layer(width, inner).items()
    }
    ends = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    return ends | names | {"model.norm.weight": (width,)}


def make(folder: Path, gigabytes: float) -> None:
    """A hub-like file (data aligned to 8 bytes only) and a folder of our own."""
    import ml_dtypes

    from flaxen.convert.formats.checkpoint import open_checkpoint
    from flaxen.convert.save import write_checkpoint

    hub = folder / "hub" / "model.safetensors"
    if not hub.is_file():
        hub.parent.mkdir(parents=True, exist_ok=True)
        rng, header, at = np.random.default_rng(0), {}, 0
        for name, shape in shapes(gigabytes).items():
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 64 + 8)
        with hub.with_suffix(".part").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for shape in shapes(gigabytes).values():
                file.write(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))
        hub.with_suffix(".part").rename(hub)
    if not (folder / "own" / "model.safetensors").is_file():
        with open_checkpoint(hub) as checkpoint:
            write_checkpoint(checkpoint, folder / "own", config={}, max_shard_size="1TB")


def plain_read(path: Path) -> float:
    """Seconds that two threads need to read the file into fresh memory."""
    size = path.stat().st_size
    start = time.perf_counter()
    out, half = np.empty(size, np.uint8), size // 2
    with path.open("rb") as file:

        def read(at: int, stop: int) -> None:
            while at < stop:
                at += os.preadv(file.fileno(), [out[at : min(stop, at + (16 << 20))].data], at)

        threads = [threading.Thread(target=read, args=span) for span in ((0, half), (half, size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - start


def load(folder: Path, devices: int, dtype: str | None) -> float:
    import jax

    from flaxen.convert.formats.checkpoint import open_checkpoint
    from flaxen.convert.place import place

    mesh = jax.make_mesh((devices,), ("fsdp",))
    jax.device_put(np.zeros(8)).block_until_ready()
    start = time.perf_counter()
    checkpoint = open_checkpoint(folder)

    def sharding(shape):
        # Rows of square matrices and columns of the others: contiguous boxes and strided ones.
        column = len(shape) == 2 and shape[0] != shape[1]
        return jax.NamedSharding(mesh, jax.P(*([None] * column), "fsdp"))

    where = {name: sharding(t.shape) for name, t in checkpoint.items()} if devices > 1 else None
    arrays = place(dict(checkpoint), where, dtype)
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - start
    total = sum(t.nbytes for t in checkpoint.values())
    assert checkpoint.bytes_read == total, (checkpoint.bytes_read, total)
    return seconds


def anonymous() -> int:
    """Anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def run(way: str, folder: Path) -> dict[str, float]:
    hub = folder / "hub"
    before = anonymous()
    seconds = {
        "plain read": lambda: plain_read(hub / "model.safetensors"),
        "one device": lambda: load(hub, 1, None),
        "8 devices": lambda: load(hub, 8, None),
        "one device, float32": lambda: load(hub, 1, "float32"),
        "own folder": lambda: load(folder / "own", 1, None),
    }[way]()
    return {"seconds": seconds, "anonymous": anonymous() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    default = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "flaxen-bench-load"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options.way, options.folder)))
        return
    make(options.folder, options.gigabytes)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.tries):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--folder", str(options.folder)]
            flags = "--xla_force_host_platform_device_count=8" if way == "8 devices" else ""
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            output = subprocess.run(command, env=environment, check=True, capture_output=True)
            results[way].append(json.loads(output.stdout))
    size = (options.folder / "hub" / "model.safetensors").stat().st_size
    base = float(np.median([r["seconds"] for r in results["plain read"]]))
    print(f"{size / 1e9:.2f} GB, medians of {options.tries} fresh processes")
    for way, runs in results.items():
        seconds = float(np.median([r["seconds"] for r in runs]))
        memory = max(r["anonymous"] for r in runs) / 1e9
        print(f"{way:22} {seconds:6.2f} s   {seconds / base:5.2f} x   {memory:5.2f} GB anonymous")


if __name__ == "__main__":
    main()
