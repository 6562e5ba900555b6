"""Loading a large checkpoint in a fresh process: flaxen, Transformers, and a plain two-thread read.

    python bench/load.py [--gigabytes 2.2] [--folder DIR] [--tries 3] [--torch PYTHON]

Every measurement is the first load of a process whose imports are done; the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

WAYS = {
    "plain two-thread read": ("hub", None, None),
    "flaxen, one device": ("hub", None, None),
    "flaxen, 8 devices, fsdp=8": ("hub", "fsdp=8", None),
    "flaxen, 8 devices, tp=4,fsdp=2": ("hub", "tp=4,fsdp=2", None),
    "flaxen, one device, to float32": ("hub", None, "float32"),
    "flaxen, own folder (views)": ("own", None, None),
    "Transformers": ("hub", None, None),
    "Transformers, own folder": ("own", None, None),
}
"""Folder, mesh and dtype of each measurement."""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def config(gigabytes: float) -> dict:
    """A Llama of about this size in bfloat16."""
    width, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    layer = 2 * width * (2.5 * width + 3 * inner)
    layers = max(1, round((gigabytes * 1e9 - 4 * vocab * width) / layer))
    return {**CONFIG, "num_hidden_layers": layers}


def make(folder: Path, gigabytes: float) -> None:
    """A hub-like folder (data aligned to 8 bytes only) and a folder of our own."""
    from flaxen.convert.formats.checkpoint import open_checkpoint
    from flaxen.pretrained import from_config

    if (folder / "own" / "config.json").is_file():
        return
    from_config(config(gigabytes), dtype="bfloat16").save(folder / "own", max_shard_size="1TB")
    hub = folder / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    with open_checkpoint(folder / "own") as checkpoint:
        header, at = {}, 0
        for name, tensor in checkpoint.items():
            end = at + tensor.nbytes
            header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]}
            at = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 64 + 8)
        with (hub / "model.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for tensor in checkpoint.values():
                file.write(np.ascontiguousarray(tensor.read()).view(np.uint8).data)
        write_json(hub / "config.json", checkpoint.config)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2))


def plain_read(path: Path) -> float:
    """Seconds that two threads take to read the file into fresh memory."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    start = time.perf_counter()
    # Pages of its own: NumPy's would be huge ones, which take several times longer to clear.
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out, half = np.frombuffer(pages, np.uint8), size // 2

    def read(at: int, stop: int) -> None:
        while at < stop:
            at += os.preadv(descriptor, [out[at : min(stop, at + (16 << 20))].data], at)

    threads = [threading.Thread(target=read, args=span) for span in ((0, half), (half, size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def load(folder: Path, mesh: str | None, dtype: str | None) -> float:
    """Seconds of `flaxen.load`; each byte of the weights is read once."""
    import jax
    import transformers

    import flaxen

    transformers.CONFIG_MAPPING["llama"]
    jax.device_put(np.zeros(8)).block_until_ready()
    start = time.perf_counter()
    model = flaxen.load(folder, mesh=mesh, dtype=dtype)
    jax.block_until_ready(model)
    seconds = time.perf_counter() - start
    weights = 2 * model.num_parameters
    assert model.loading.bytes_read == weights, (model.loading.bytes_read, weights)
    return seconds


def load_with_transformers(folder: Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    assert LlamaForCausalLM
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()
    return time.perf_counter() - start


def anonymous() -> int:
    """Anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def run(way: str, folder: Path) -> dict[str, float]:
    where, mesh, dtype = WAYS[way]
    before = anonymous()
    if way.startswith("plain"):
        seconds = plain_read(folder / where / "model.safetensors")
    elif way.startswith("flaxen"):
        seconds = load(folder / where, mesh, dtype)
    else:
        seconds = load_with_transformers(folder / where)
    return {"seconds": seconds, "anonymous": anonymous() - before}


def measure(way: str, folder: Path, python: str) -> dict[str, float]:
    """`run` in a fresh process."""
    devices = 8 if WAYS[way][1] else 1
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [python, __file__, "--way", way, "--folder", str(folder)]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return json.loads(output.stdout.splitlines()[-1])


def table(results: dict[str, list[dict[str, float]]], size: int) -> str:
    median = lambda runs: float(np.median([r["seconds"] for r in runs]))
    base = median(results["plain two-thread read"])
    tries = len(results["plain two-thread read"])
    lines = [
        f"{size / 1e9:.2f} GB of bfloat16, warm page cache, medians of {tries} fresh processes.",
        "",
        "| way | seconds | against the plain read | anonymous memory, GB |",
        "|---|---|---|---|",
    ]
    for way, runs in results.items():
        memory = max(r["anonymous"] for r in runs) / 1e9
        lines.append(f"| {way} | {median(runs):.2f} | {median(runs) / base:.2f} | {memory:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    default = Path(__file__).parent.parent / ".cache" / "bench" / "load"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--torch", help="python of an environment with torch")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options.way, options.folder)))
        return
    make(options.folder, options.gigabytes)
    ways = [w for w in WAYS if options.torch or not w.startswith("Transformers")]
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.tries):
        for way in ways:
            python = options.torch if way.startswith("Transformers") else sys.executable
            results[way].append(measure(way, options.folder, python))
    text = table(results, (options.folder / "hub" / "model.safetensors").stat().st_size)
    print(text)
    if options.torch:
        from results import RESULTS, write_section

        write_section(RESULTS, "loading", text + "\n")


if __name__ == "__main__":
    main()
