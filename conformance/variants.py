"""Unseen variants of every family, ours against Transformers on torch (`make variants`).

    python conformance/variants.py --torch .venv-torch/bin/python [--only TYPE ...] [--count 3]

Of each model type, variants are drawn in which every key of its config that may vary does so:
widths, heads, vocabularies, biases, ties, windows, patterns of layers, activations, ropes, experts.
Torch makes them with random weights (`make_variants.py`); they are loaded here, called, and where
they generate also run with a cache for 8 greedy tokens. What is refused here is left out of a
variant and listed. The exit code is 1 if a number or a token differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from variant_bases import Base, bases
from variant_changes import Change, changed, possible
from variant_keys import DERIVED, variants

ROOT = Path(__file__).parents[1]
BOUND = 2e-5
WIDER = {"qwen3_next": 1e-4, "bamba": 5e-5}
"""Largest error relative to the largest output (or to one), and where own rounding is larger."""
MARGIN = 1e-3
"""Tokens are compared up to one that was the best by less."""

FEW = 3
"""So many bases are each varied in all of their keys."""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default=".venv-torch/bin/python", help="a Python with torch")
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    parser.add_argument("--count", type=int, default=3, help="variants of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="a folder for the variants; default: one that is removed")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each variant")
    args = parser.parse_args()
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        place = Path(args.keep or place)
        for row in compared(jobs(args.only, args.count, args.seed), args.torch, place):
            rows.append(row)
            print(json.dumps(row) if args.json else line(row), flush=True)
    return told(rows, args.json)


def prepare() -> None:
    """Most of the time is compiling, so that is quick rather than thorough."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def jobs(only: list[str] | None, count: int, seed: int) -> list[Row]:
    """What torch is to make."""
    from flaxen.families import FILES

    return [
        job(model_type, number, base, count, seed)
        for model_type in only or FILES
        for number, base in enumerate(in_turn(bases(model_type), count))
    ]


def in_turn(bases: list[Base], count: int) -> list[Base]:
    """Each base `count` times; where they are many heads on equal layers, once."""
    return bases * (count if len(bases) <= FEW else 1)


def job(model_type: str, number: int, base: Base, count: int, seed: int) -> Row:
    """A variant of a base: its keys are dealt out to `count` of them."""
    whole = full(model_type, base)
    base = dataclasses.replace(base, config=explicit(base.config, whole))
    dealt = variants(whole, count, Random(f"{base.architecture} {whole} {seed}"))
    several = len(bases(model_type))
    part = dealt[(number if several > FEW else number // several) % count]
    changes, refused = possible(part, lambda changes: refusal(model_type, base, changes))
    return {
        "name": f"{model_type}.{number}",
        "model_type": model_type,
        "seed": Random(f"{model_type} {number} {seed}").randrange(2**31),
        "architecture": base.architecture,
        "kind": base.kind,
        "config": base.config,
        "changes": changes,
        "refused": refused,
    }


def raw(model_type: str, base: Base, changes: list[Change]) -> dict[str, Any]:
    config = changed(base.config, changes)
    return {**config, "model_type": model_type, "architectures": [base.architecture]}


def full(model_type: str, base: Base) -> dict[str, Any]:
    """The config with all keys of its class."""
    from flaxen.families.config import hf_config

    return hf_config(raw(model_type, base, [])).to_dict()


OLDER = (
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "rotary_pct",
    "rope_local_base_freq",
)
SAID = ("head_dim", "mamba_d_head", "rope_parameters")


def explicit(config: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A config that says what its class would else make of keys that are about to change."""
    derived = DERIVED.get(whole.get("model_type", ""), ())
    said = {k: whole[k] for k in SAID if whole.get(k) and k not in derived}
    older = OLDER if "rope_parameters" in said else ()
    inner = {
        k: explicit(v, whole[k]) for k, v in config.items() if k.endswith("_config") and whole[k]
    }
    return {k: v for k, v in config.items() if k not in older} | said | inner


def refusal(model_type: str, base: Base, changes: list[Change]) -> str | None:
    """Why there is no such model, if so."""
    from flaxen.core.errors import ConfigError
    from flaxen.families.config import abstract_module, hf_config

    try:
        abstract_module(hf_config(raw(model_type, base, changes)))
    except ConfigError as error:
        return str(error)
    return None


def compared(jobs: list[Row], python: str, place: Path) -> Iterator[Row]:
    """Torch makes the next variant while one is looked at."""
    import jax

    place.mkdir(parents=True, exist_ok=True)
    file = place / "jobs.json"
    file.write_text(json.dumps(jobs))
    made = subprocess.Popen(
        [python, str(ROOT / "conformance" / "make_variants.py"), str(file), str(place)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    for text in made.stdout:
        job = json.loads(text)
        told = {k: job[k] for k in ("name", "architecture", "changes", "refused", "impossible")}
        yield told | ({"failed": job["failed"]} if "failed" in job else measured(job))
        jax.clear_caches()
    if made.wait():
        raise SystemExit(f"{python} failed; see above.")


def measured(job: Row) -> Row:
    """The largest error, and how many greedy tokens are right; or what went wrong."""
    import flaxen
    from flaxen.core.errors import InputError

    with np.load(Path(job["folder"]) / "arrays.npz") as file:
        arrays = {key: file[key] for key in file.files}
    part = lambda of: {k.removeprefix(of): x for k, x in arrays.items() if k.startswith(of)}
    given, want, new = part("in/"), part("out/"), part("gen/")
    try:
        model = flaxen.load(job["folder"], progress=False)
        out = model(**given)
        errors = {key: error(np.asarray(getattr(out, key)), x, given) for key, x in want.items()}
        row: Row = {"error": max(errors.values()), "bound": WIDER.get(job["model_type"], BOUND)}
        if new:
            row["right"], row["sure"] = tokens(model, given, new)
    except InputError as refusal:
        return {"unable": str(refusal)}
    except Exception as problem:  # a variant must not end the others
        return {"wrong": f"{type(problem).__name__}: {str(problem)[:400]}"}
    if not row["error"] <= row["bound"] or row.get("right") != row.get("sure"):
        row["wrong"] = f"{errors}"
    return row


def error(got: np.ndarray, want: np.ndarray, given: dict[str, np.ndarray]) -> float:
    """Relative to the largest; what stands at padding is nobody's."""
    mask = given.get("attention_mask")
    if "decoder_input_ids" not in given and mask is not None and want.shape[:2] == mask.shape:
        got, want = got[mask == 1], want[mask == 1]
    if got.shape != want.shape:
        return float("inf")
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


def tokens(model: Any, given: dict[str, Any], new: dict[str, np.ndarray]) -> tuple[int, int]:
    """How many greedy tokens are those of torch, of those that it was sure of."""
    want, gaps = new["tokens"], new["gaps"]
    prompt = {k: x for k, x in given.items() if k not in ("position_ids", "decoder_input_ids")}
    start = {k: x for k, x in new.items() if k == "decoder_input_ids"}
    asked = {"max_new_tokens": gaps.shape[1], "eos_token_id": []}
    if start:
        asked |= {"forced_bos_token_id": None, "forced_eos_token_id": None}
    got = np.asarray(model.generate(**prompt, **start, **asked))
    sure = np.cumprod(gaps > MARGIN, 1) == 1
    at = want.shape[1] - gaps.shape[1]
    return int((got[:, at:] == want[:, at:])[sure].sum()), int(sure.sum())


def line(row: Row) -> str:
    """A variant in a line, and one for each value that is refused here, or has no model there."""
    if "failed" in row:
        said = f"no such model: {row['failed']}"
    elif "error" in row:
        said = f"{row['error']:.1e}"
        said += f", {row['right']} of {row['sure']} tokens" if "sure" in row else ""
    else:
        said = f"refused: {row['unable']}" if "unable" in row else ""
    said += f"  WRONG {row['wrong']}" if "wrong" in row else ""
    keys = ", ".join(f"{'.'.join(path)}={value!r}" for path, value in row["changes"])
    lines = [f"{row['name']:28} {said}\n    {row['architecture']}: {keys}"]
    for whose in ("refused", "impossible"):
        lines += [f"    {whose} {key}={value!r}: {why}" for key, value, why in row[whose]]
    return "\n".join(lines)


def told(rows: list[Row], as_json: bool) -> int:
    """The last words, and the exit code."""
    measured = [row for row in rows if "error" in row]
    bad = [row["name"] for row in rows if "wrong" in row]
    if not as_json:
        families = {row["name"].rpartition(".")[0] for row in measured}
        worst = max((row["error"] for row in measured), default=0.0)
        print(
            f"{len(measured)} variants of {len(families)} model types compared, worst {worst:.1e}; "
            f"{sum(len(row['refused']) for row in rows)} values refused, "
            f"{sum('failed' in row for row in rows)} variants that Transformers has not, "
            f"{len(bad)} wrong{': ' if bad else ''}{', '.join(bad)}"
        )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
