"""Loading large checkpoints: flaxen, Transformers, and a plain two-thread read into fresh memory.

    make bench-load        or: python bench/load.py [--size 4.3] [--turns 5] [--torch PYTHON] ...

Every measurement is the first load of a fresh process whose imports are done. The ways take turns;
ratios are to the plain read of the same turn. With --torch the table goes to bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from results import RESULTS, write_section

from flaxen.convert.formats.writing import Layout
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import relate
from flaxen.families.config import abstract_module, hf_config

WORK = Path(__file__).parent / "load_work.py"
CACHE = Path(__file__).parent.parent / ".cache" / "bench" / "load"

COMMON = {
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "head_dim": 128,
    "intermediate_size": 5632,
    **COMMON,
}
EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 1024,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "num_local_experts": 64,
    "num_experts_per_tok": 2,
    **COMMON,
}


class Noise(LazyTensor):
    """Weights that cost nothing to make: a few million normal numbers, again and again."""

    dtype = np.dtype(ml_dtypes.bfloat16)
    block = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02).astype(dtype)

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    def fill(self, box: Any, out: np.ndarray) -> None:
        flat = out.reshape(-1)
        for at in range(0, flat.size, self.block.size):
            flat[at : at + self.block.size] = self.block[: flat.size - at]


class Way(NamedTuple):
    """One row of the table."""

    title: str
    way: str
    folder: str
    mesh: str | None = None
    dtype: str | None = None
    cold: bool = False


def ways(kind: str) -> list[Way]:
    """The rows for a kind of checkpoint, the plain reads first."""
    meshes = ["fsdp=8", "tp=4,fsdp=2"] if kind == "dense" else ["ep=8", "ep=4,tp=2"]
    rows = [
        Way("plain two-thread read", "plain", kind),
        Way("flaxen, one device", "flaxen", kind),
        *(Way(f"flaxen, 8 devices, {mesh}", "flaxen", kind, mesh) for mesh in meshes),
        Way("Transformers", "transformers", kind),
    ]
    cold = [r._replace(title=f"{r.title}, cold", cold=True) for r in rows if r.mesh != meshes[1]]
    extra = [Way("flaxen, one device, to float32", "flaxen", kind, None, "float32")]
    if kind == "dense":
        extra.append(Way("flaxen, own folder (views)", "flaxen", "dense-own"))
    return rows + extra + cold


def config(kind: str, gigabytes: float) -> dict[str, Any]:
    """A Llama or a Mixtral of about this size in bfloat16."""
    c = dict(DENSE if kind == "dense" else EXPERTS)
    width, vocab = c["hidden_size"], c["vocab_size"]
    rest = gigabytes * 1e9 - 4 * vocab * width
    if kind == "dense":
        layer = 2 * width * (2.5 * width + 3 * c["intermediate_size"])
        return {**c, "num_hidden_layers": max(1, round(rest / layer))}
    count = 6 * width * c["num_hidden_layers"] * c["num_local_experts"]
    return {**c, "intermediate_size": max(64, round(rest / count / 64) * 64)}


def make(folder: Path, kind: str, gigabytes: float) -> None:
    """A hub-like folder, its data aligned to 8 bytes only, and for `dense` one as we write it."""

    wanted = config(kind, gigabytes)
    module, family, _ = abstract_module(hf_config(wanted))
    tensors = {n: Noise(shape) for n, shape in relate(module, family.names).shapes().items()}
    for name in [kind] + (["dense-own"] if kind == "dense" else []):
        target = folder / name
        if (target / "config.json").is_file():
            if json.loads((target / "config.json").read_text()) == wanted:
                continue
            (target / "config.json").unlink()
        target.mkdir(parents=True, exist_ok=True)
        layout = Layout.of(tensors, {"format": "pt"})
        layout = shifted(layout) if name == kind else layout
        layout.begin(target / "model.safetensors")
        layout.fill(target / "model.safetensors", tensors, None, None)
        (target / "config.json").write_text(json.dumps(wanted, indent=2))


def shifted(layout: Layout) -> Layout:
    """The same file with its data 8 bytes further on: files of the hub are not aligned to 64."""
    raw = layout.header[8:] + b" " * 8
    starts = {name: start + 8 for name, start in layout.starts.items()}
    return Layout(len(raw).to_bytes(8, "little") + raw, starts, layout.size + 8)


def measure(row: Way, folder: Path, torch: str | None) -> dict[str, float]:
    """One load in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={8 if row.mesh else 1}"
    command = [torch if row.way == "transformers" else sys.executable, str(WORK), row.way]
    command += [str(folder / row.folder), *(["--cold"] if row.cold else [])]
    command += [f"--{k}={v}" for k in ("mesh", "dtype") if (v := getattr(row, k))]
    output = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=600,
    )
    return json.loads(output.stdout.splitlines()[-1])


def table(rows: list[Way], results: dict[Way, list[dict[str, float]]]) -> str:
    lines = [
        "| way | seconds | with every page touched | against the plain read, touched | min-max | "
        "peak anonymous memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        runs = results[row]
        base = next(r for r in rows if r.way == "plain" and r.cold == row.cold)
        loaded, touched = (statistics.median(r[k] for r in runs) for k in ("loaded", "touched"))
        ratios = [a["touched"] / b["touched"] for a, b in zip(runs, results[base], strict=True)]
        warm = max(r["cached"] for r in runs) if row.cold else min(r["cached"] for r in runs)
        odd = f" ({warm:.0%} was cached)" if abs(warm - (not row.cold)) > 0.1 else ""
        lines.append(
            f"| {row.title}{odd} | {loaded:.2f} | {touched:.2f} | "
            f"**{statistics.median(ratios):.2f}** | {min(ratios):.2f}-{max(ratios):.2f} | "
            f"{max(r['memory'] for r in runs) / 1e9:.2f} |"
        )
    return "\n".join(lines)


def compare(kind: str, given: argparse.Namespace) -> str:
    """Make a checkpoint, load it in every way in turn, and say what came of it."""
    make(given.folder, kind, given.size)
    rows = [r for r in ways(kind) if given.torch or r.way != "transformers"]
    results: dict[Way, list[dict[str, float]]] = {row: [] for row in rows}
    for turn in range(given.turns):
        for row in rows:
            if turn == 0 and not row.cold:
                measure(rows[0]._replace(folder=row.folder), given.folder, None)
            results[row].append(measure(row, given.folder, given.torch))
            print(kind, turn + 1, row.title, f"{results[row][-1]['loaded']:.2f} s", flush=True)
    size = (given.folder / kind / "model.safetensors").stat().st_size / 1e9
    titles = {"dense": "Dense (Llama)", "experts": "Experts (Mixtral, 8 layers of 64 experts)"}
    about = f"{titles[kind]}, {size:.2f} GB of bfloat16, {given.turns} turns"
    return f"{about}:\n\n{table(rows, results)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=4.3, help="gigabytes of each checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=CACHE)
    parser.add_argument("--torch", help="python of an environment with torch")
    parser.add_argument("--kinds", nargs="+", default=["dense", "experts"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    text = "\n".join(compare(kind, given) for kind in given.kinds)
    text = (
        f"Medians; a fresh process each. {os.cpu_count()} cores; load {load:.1f} before. Cold: the "
        "files were dropped from this system's page cache; a host below it may still have them.\n\n"
        + text
    )
    print("\n" + text)
    if given.torch:
        write_section(given.results, "loading", text)


if __name__ == "__main__":
    main()
