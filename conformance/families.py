"""Writes docs/families.md: every family, how long it is, and every golden case of it under every
attention mechanism.

    python conformance/families.py [--only CASE...] [--processes 2] [--fresh]

Results are kept in .cache/families.jsonl as they come, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import inspect
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
sys.path.insert(0, str(ROOT / "tests"))
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
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    parts = [
        subprocess.Popen([*command, "--part", str(i), str(args.processes)], env=env)
        for i in range(args.processes)
    ]
    if any(part.wait() for part in parts):
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

    from flaxen.attention import MECHANISMS

    known = {(row["case"], row["mechanism"]) for row in done()}
    names = [name for name in only or golden.cases() if golden.about(name)["kind"] == "causal"]
    mine = [(n, m) for n in names for m in MECHANISMS][part::parts]
    start = time.perf_counter()
    with RESULTS.open("a") as file:
        for name, mechanism in mine:
            if (name, mechanism) in known:
                continue
            row = {"case": name, "mechanism": mechanism} | measured(name, mechanism)
            print(json.dumps(row), file=file, flush=True)
            minutes = (time.perf_counter() - start) / 60
            print(f"{minutes:5.1f} min  {json.dumps(row)}", flush=True)


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
            pairs = [
                (model(x["full_input_ids"]).logits, x["full_logits"], 1),
                (model(x["long_input_ids"]).logits, x["long_logits"], 1),
                (
                    model(x["input_ids"], x["attention_mask"]).logits,
                    x["logits"],
                    x["attention_mask"][..., None],
                ),
            ]
            error = max(float(np.abs((np.asarray(y) - want) * m).max()) for y, want, m in pairs)
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

    cases = collections.defaultdict(list)
    for name in golden.cases():
        cases[golden.about(name)["model_type"]].append(name)
    lengths = [lines(model_type) for model_type in FILES]
    text = [
        HEAD.format(
            count=len(FILES),
            median=sorted(lengths)[len(lengths) // 2],
            most=max(lengths),
            measured=len(rows),
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

    mine = [row for row in rows if row["case"] in cases]
    failed = {row["case"] for row in mine if wrong(row)}
    taken = {row["mechanism"] for row in mine if "refused" not in row}
    taken -= {row["mechanism"] for row in mine if "refused" in row}
    parts, axes = described(cases)
    cells = [
        f"`{model_type}`",
        f"{FILES[model_type]}.py",
        str(lines(model_type)),
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


def lines(model_type: str) -> int:
    """Lines of a family: its function, and what else of its file only it uses."""
    from flaxen.families import FILES

    file = importlib.import_module(f"flaxen.families.{FILES[model_type]}")
    source = inspect.getsource(file).splitlines()
    return own_lines(file.__name__, model_type, "\n".join(source))


def own_lines(module: str, model_type: str, source: str) -> int:
    """Of the file's top-level statements, those that this family's function reaches; what several
    families share counts with the first of them.
    """
    import ast

    tree, first = ast.parse(source), {}
    named = {name: node for node in tree.body for name in defined(node)}
    for node in tree.body:
        kind = registered(node)
        if kind is None:
            continue
        todo, seen = [node], []
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.append(at)
            names = {n.id for n in ast.walk(at) if isinstance(n, ast.Name)}
            todo += [named[n] for n in names if n in named and n != "FAMILIES"]
        for at in seen:
            first.setdefault(at, kind)
    mine = [at for at, kinds in first.items() if model_type in kinds]
    return sum(span(at) for at in mine)


def span(node: Any) -> int:
    above = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return node.end_lineno - above + 1


def defined(node: Any) -> list[str]:
    import ast

    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return []


def registered(node: Any) -> tuple[str, ...] | None:
    """The model types that a statement registers."""
    import ast

    if not isinstance(node, ast.FunctionDef):
        return None
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
    kinds = [
        c.args[1].value
        for c in calls
        if getattr(c.func, "id", "") == "family" and isinstance(c.args[1], ast.Constant)
    ]
    return tuple(kinds) or None


HEAD = """# Families

{count} model types. A family is as long as its difference from its relatives: the median is
{median} lines, the longest {most} (its function, its names table and the functions only it needs;
what several of a file share counts with the first). Golden cases are tiny models with outputs of
Transformers on torch: logits of full, long and padded rows within 5e-5 (qwen3_next: 2e-4), and 16
greedy tokens with a cache, under every attention mechanism that takes the calls: {measured}
measurements, written by `make families`.
"""


if __name__ == "__main__":
    main()
