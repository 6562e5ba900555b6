"""Writes docs/families.md: every family, how long it is, and every golden case of it under every
attention mechanism.

    python conformance/families.py [--only CASE...] [--processes 2] [--fresh]

Results are kept in .cache/families.jsonl as they come, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "conformance")]
RESULTS = ROOT / ".cache" / "families.jsonl"
PAGE = ROOT / "docs" / "families.md"
BOUND = 5e-5
WIDER = {"qwen3_next": 2e-4}
"""Cases whose own rounding is larger."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="golden cases; default: all")
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
    from exactness import environment

    env = environment()
    parts = [
        subprocess.Popen([*command, "--part", str(i), str(args.processes)], env=env)
        for i in range(args.processes)
    ]
    codes = [part.wait() for part in parts]
    if any(codes):
        sys.exit("A process failed; its results so far are kept.")
    rows = done()
    PAGE.write_text(page(rows))
    bad = [row for row in rows if wrong(row)]
    refused = sum("refused" in row for row in rows)
    print(f"{len(rows)} cases under a mechanism: {refused} refused, {len(bad)} wrong")
    for row in bad:
        print("WRONG", row)
    sys.exit(bool(bad))


def work(only: list[str] | None, part: int, parts: int) -> None:
    """Measure this process's share of what is not known yet."""
    import golden

    known = {(row["case"], row["mechanism"]) for row in done()}
    names = [name for name in only or golden.cases() if golden.about(name)["kind"] == "causal"]
    mine = [(n, m) for n in names for m in mechanisms(n)][part::parts]
    start = time.perf_counter()
    with RESULTS.open("a") as file:
        for name, mechanism in mine:
            if (name, mechanism) in known:
                continue
            row = {"case": name, "mechanism": mechanism} | measured(name, mechanism)
            print(json.dumps(row), file=file, flush=True)
            minutes = (time.perf_counter() - start) / 60
            print(f"{minutes:5.1f} min  {json.dumps(row)}", flush=True)


def mechanisms(name: str) -> list[str]:
    """Those that a case is run under: one, where nothing looks at other tokens."""
    import golden

    from flaxen.attention import MECHANISMS
    from flaxen.core.tree import walk
    from flaxen.families.config import abstract_module, hf_config
    from flaxen.layers.attention import Attends

    parts = walk(abstract_module(hf_config(golden.about(name)["config"]))[0])
    return list(MECHANISMS) if any(isinstance(p, Attends) for p in parts) else ["vanilla"]


def measured(name: str, mechanism: str) -> dict[str, Any]:
    """The largest error of the logits, and whether the greedy tokens are the right ones; or why the
    mechanism does not take this model's calls.
    """
    import golden
    import numpy as np

    import flaxen
    from flaxen.core.errors import FlaxenError

    x = golden.case(name).arrays
    with tempfile.TemporaryDirectory() as place:
        folder = golden.write_folder(golden.case(name), place)
        try:
            model = flaxen.load(folder, attention=mechanism)
            every = np.concatenate([x["attention_mask"], np.ones_like(x["full_input_ids"])])
            ids = np.concatenate([x["input_ids"], x["full_input_ids"]])
            want = np.concatenate([x["logits"], x["full_logits"]])
            short = np.asarray(model(ids, every).logits) - want
            long = np.asarray(model(x["long_input_ids"]).logits) - x["long_logits"]
            error = float(max(np.abs(short[every == 1]).max(), np.abs(long).max()))
            ids = model.generate(
                x["gen_input_ids"], x["gen_attention_mask"], max_new_tokens=16, eos_token_id=[]
            )
        except FlaxenError as reason:
            return {"refused": str(reason).splitlines()[0]}
    return {"logits": error, "tokens": bool(np.array_equal(ids, x["gen_sequences"]))}


def wrong(row: dict[str, Any]) -> bool:
    if "refused" in row:
        return False
    return not (row["logits"] <= WIDER.get(row["case"], BOUND) and row["tokens"])


def done() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return list({(row["case"], row["mechanism"]): row for row in rows}.values())


def page(rows: list[dict[str, Any]]) -> str:
    import golden

    from flaxen.families import FILES
    from flaxen.show.family_source import length

    cases = collections.defaultdict(list)
    for name in golden.cases(None):
        cases[golden.about(name)["model_type"]].append(name)
    lengths = [length(model_type) for model_type in FILES]
    text = [
        HEAD.format(
            count=len(FILES),
            median=sorted(lengths)[len(lengths) // 2],
            most=max(lengths),
            measured=len(rows),
            cases=len({row["case"] for row in rows}),
        ),
        "| model type | file | lines | parts | axes that can be cut | golden cases | attention |",
        "|---|---|---|---|---|---|---|",
    ]
    text += [family_row(t, cases[t], rows) for t in sorted(FILES)]
    reasons = collections.Counter(row["refused"] for row in rows if "refused" in row)
    text += ["", "## What mechanisms refuse", ""]
    text += [f"* {reason} ({count})" for reason, count in reasons.most_common()]
    return "\n".join(text) + "\n"


def family_row(model_type: str, cases: list[str], rows: list[dict[str, Any]]) -> str:
    from flaxen.families import FILES
    from flaxen.show.family_source import length

    mine = [row for row in rows if row["case"] in cases]
    failed = {row["case"] for row in mine if wrong(row)}
    taken = {row["mechanism"] for row in mine if "refused" not in row}
    taken -= {row["mechanism"] for row in mine if "refused" in row}
    parts, axes = described(cases)
    cells = [
        f"`{model_type}`",
        f"{FILES[model_type]}.py",
        str(length(model_type)),
        ", ".join(parts) or "-",
        ", ".join(axes) or "-",
        ", ".join(f"{case}{' (fails)' if case in failed else ''}" for case in cases) or "-",
        ", ".join(sorted(taken)) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def described(cases: Iterable[str]) -> tuple[list[str], list[str]]:
    """The parts beyond Llama's, and the axes of weights, of the models of these cases."""
    import golden

    from flaxen.core.tree import is_param, paths, walk
    from flaxen.families.config import abstract_module, hf_config

    plain = {type(x).__name__ for x in walk(abstract_module(hf_config({"model_type": "llama"}))[0])}
    parts, axes = set(), set()
    for case in cases:
        module = abstract_module(hf_config(golden.about(case)["config"]))[0]
        parts |= {type(x).__name__ for x in walk(module)} - plain
        weights = paths(module, is_param).values()
        axes |= {axis for w in weights if is_param(w) for axis in w.axes}
    return sorted(parts), sorted(axes)


HEAD = """# Families

{count} model types. A family is as long as its difference from its relatives: the median is
{median} lines, the longest {most} (its function, its names table and the functions only it needs;
what several of a file share counts with the first). Golden cases are tiny models with outputs of
Transformers on torch: logits of full, long and padded rows within 5e-5 (qwen3_next: 2e-4), and 16
greedy tokens with a cache, under every attention mechanism that takes the calls: {measured}
measurements of {cases} cases, written by `make families`. The last column lists the mechanisms that
take every call of a family; a dash there says that it was not measured in this run, or that it has
no attention. Cases with pictures, encoders and encoder-decoders are compared in the tests alone.
"""


if __name__ == "__main__":
    main()
