"""Writes docs/exactness.md: every attention mechanism x mesh x feature against float64.

    python conformance/exactness.py [--only MECHANISM...] [--processes 2]

Results are kept in .cache/exactness.jsonl as they come, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = ROOT / ".cache" / "exactness.jsonl"
PAGE = ROOT / "docs" / "exactness.md"
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="mechanisms; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--part", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if args.part is None and args.fresh:
        RESULTS.unlink(missing_ok=True)
    if args.part is not None:
        work(args.only, *args.part)
        return
    command = [sys.executable, __file__, *(["--only", *args.only] if args.only else [])]
    parts = [
        subprocess.Popen([*command, "--part", str(i), str(args.processes)], env=environment())
        for i in range(args.processes)
    ]
    codes = [part.wait() for part in parts]
    if any(codes):
        sys.exit("A process failed; its results so far are kept.")
    rows = whole_cases(done())
    PAGE.write_text(page(rows))
    bad = [row for row in rows if wrong(row)]
    print(
        f"{len(rows)} measurements, {sum('refused' in r for r in rows)} refused, {len(bad)} wrong"
    )
    for row in bad:
        print("WRONG", row)
    sys.exit(bool(bad))


def environment() -> dict[str, str]:
    """Eight virtual devices; with fewer threads than devices, collectives can wait for ever."""
    # Most of the time is compiling, so that is quick rather than thorough.
    flags = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "NPROC": "32",
    }


def work(only: list[str] | None, part: int, parts: int) -> None:
    """Measure this process's share of what is not known yet."""
    from attention_matrix import CASES, MESHES, measure

    from flaxen.attention import MECHANISMS

    known = {key(row) for row in done()}
    names = only or list(MECHANISMS)
    cells = [(c, m, x, d) for c in CASES for m in names for d in BOUNDS for x in MESHES[d]]
    mine = [cell for cell in cells[part::parts] if cell not in known]
    start = time.perf_counter()
    with RESULTS.open("a") as file:
        for i, (case, mechanism, mesh, dtype) in enumerate(mine, 1):
            found = measure(CASES[case], mechanism, mesh, dtype)
            row = {"case": case, "mechanism": mechanism, "mesh": mesh, "dtype": dtype}
            refused = isinstance(found, str)
            row |= {"refused": found} if refused else {"forward": found[0], "gradient": found[1]}
            print(json.dumps(row), file=file, flush=True)
            if i % 20 == 0:
                minutes = (time.perf_counter() - start) / 60
                print(f"part {part}: {i} of {len(mine)} in {minutes:.1f} min", flush=True)


def done() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return list({key(row): row for row in rows}.values())


def whole_cases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those cases that are measured everywhere."""
    counts = collections.Counter(row["case"] for row in rows)
    return [row for row in rows if counts[row["case"]] == max(counts.values())]


def key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["case"], row["mechanism"], row["mesh"], row["dtype"]


def wrong(row: dict[str, Any]) -> bool:
    worst = max(row.get("forward", 0), row.get("gradient", 0))
    return not worst <= BOUNDS[row["dtype"]]


def page(rows: list[dict[str, Any]]) -> str:
    """One table for each mechanism, and its refusals in words below."""
    import jax
    from attention_matrix import CASES, MESHES

    cases, meshes = list(CASES), MESHES["float32"]
    rows = sorted(rows, key=lambda r: (cases.index(r["case"]), meshes.index(r["mesh"])))
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    text = [HEAD.format(version=jax.__version__, count=len(rows))]
    for name in sorted(names):
        text += ["", f"## {name}", "", *table([row for row in rows if row["mechanism"] == name])]
    return "\n".join(text) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    reasons = list(dict.fromkeys(row["refused"] for row in rows if "refused" in row))
    cells = {key(row): row for row in rows}
    name = rows[0]["mechanism"]

    def cell(case: str, mesh: str) -> str:
        found = [cells[key] for d in BOUNDS if (key := (case, name, mesh, d)) in cells]
        return ", ".join(map(words, found))

    def words(row: dict[str, Any]) -> str:
        if "refused" in row:
            return f"refused ({reasons.index(row['refused']) + 1})"
        return f"{row['forward']:.0e} / {row['gradient']:.0e}"

    lines = [f"| | {' | '.join(meshes)} |", f"|---{'|---' * len(meshes)}|"]
    lines += [f"| {c} | {' | '.join(cell(c, m) for m in meshes)} |" for c in cases]
    if reasons:
        lines += ["", *(f"{i}. refused: {reason}" for i, reason in enumerate(reasons, 1))]
    return lines


HEAD = """# Exactness

Every attention mechanism on every mesh of eight virtual devices, against a float64 NumPy
reference, written by `make exactness` with jax {version}: {count} measurements. A cell holds the
largest error of the result and of the gradients (in queries, keys, values, and in bias, slopes and
sinks where there are any; relative to the largest gradient where that is above one), in float32,
then, on the first and the last mesh, in bfloat16. Bounds: 1e-5 in float32, 2e-2 in bfloat16. Keys
that nobody may see are NaN in these inputs."""


if __name__ == "__main__":
    main()
