"""`flaxen quantize`: what 8 or 4 bits a weight cost and save, and the folder that others load."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from flaxen.cli.options import Count, Json, Loading, Source, about
from flaxen.cli.output import print_json, print_out
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.model import Model

TEXT = Path(__file__).parent / "data" / "moby_dick_test.txt"


def quantize(
    model: Source,
    target: Annotated[
        str | None, about("A folder (GPTQ) or .gguf file (q8_0) to write; default: only measure.")
    ] = None,
    *,
    bits: Annotated[Literal[8, 4], about("For every projection.")] = 8,
    rules: Annotated[
        list[str] | None,
        about(
            "REGEX=8, =4 or =none: instead of --bits, by path; the first found; may be repeated."
        ),
    ] = None,
    text: Annotated[
        str | None, about("A file to measure on; default: a chapter of a novel.")
    ] = None,
    length: Annotated[Count, about("Tokens the model sees at once.")] = 512,
    speed: Annotated[bool, about("Measure decoding, too.")] = False,
    overwrite: Annotated[bool, about("Replace a model that is there.")] = False,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Round weights to 8 or 4 bits: perplexity, bytes and errors before and after.

    With a target the result is written, and what is measured is what was written.
    """
    from flaxen.cli.convert import refuse_to_replace

    ways = _rules(rules) if rules else bits
    if target is not None:
        if target.endswith(".gguf") and ways != 8:
            raise InputError("A .gguf file is written with 8 bits throughout; name a folder.")
        refuse_to_replace(Path(target), overwrite)
    words = Path(text or TEXT).read_text(encoding="utf-8")
    loaded, tok = loading.load(model), loading.tokenizer(model)
    ids = np.asarray(tok(words, add_special_tokens=False)["input_ids"])
    rounded = loaded.quantize(ways)
    errors = kinds(loaded, rounded)
    if target is not None:
        rounded = _written(loaded, rounded, target, tok)
    found: dict[str, Any] = {"tokens": len(ids)}
    for name, each in (("before", loaded), ("after", rounded)):
        found[name] = {"perplexity": perplexity(each, ids, length), "bytes": _bytes(each)}
        if speed:
            from flaxen.cli.bench import measured

            found[name]["decode"] = measured(each, 1, 32, 32, 3)["decode_tokens_per_second"]
    _print(found | {"kinds": errors, "target": target}, json)


def _rules(rules: list[str]) -> dict[str, int | None]:
    found = {}
    for rule in rules:
        match = re.fullmatch(r"(.+)=(8|4|none)", rule)
        if match is None:
            raise InputError(f"--rules {rule!r}; write for example 'mlp=4' or 'lm_head=none'.")
        found[match[1]] = None if match[2] == "none" else int(match[2])
    return found


def _written(loaded: Model, rounded: Model, target: str, tok: Any) -> Model:
    import flaxen

    if target.endswith(".gguf"):
        loaded.save(target, quantize="q8_0", tokenizer=tok)
    else:
        rounded.save(target, quantize="gptq", tokenizer=tok)
    return flaxen.load(target, quantized="keep")


def perplexity(model: Model, ids: np.ndarray, length: int) -> float:
    """exp of the mean loss of every next token, in rows of at most `length` tokens.

    Raises:
        InputError: fewer than two tokens.
    """
    if len(ids) < 2:
        raise InputError(f"A perplexity needs two tokens or more; the text has {len(ids)}.")
    rows = [ids[i : i + length] for i in range(0, len(ids), length)]
    rows = [row[None] for row in rows if len(row) == length] or [ids[None]]
    losses = [np.asarray(model(row, labels=row).loss, np.float64) for row in rows]
    return math.exp(min(float(np.mean(losses)), 700))


def kinds(plain: Model, rounded: Model) -> list[dict[str, Any]]:
    """What rounding does to each kind of weight: |w - rounded| / |w| over all layers, the largest
    single change, and bytes.
    """
    import jax

    from flaxen.core.tree import paths
    from flaxen.quantize import RoundedWeight

    is_rounded = lambda x: isinstance(x, RoundedWeight)
    before, found = plain.parameters(), {}
    for path, leaf in paths(rounded.module, is_rounded).items():
        if is_rounded(leaf):
            name = re.sub(r"^.*\.\d+\.", "", path).removesuffix(".weight")
            found.setdefault((name, leaf.rounding.bits), []).append((before[path], leaf))
    rows = []
    for (name, bits), pairs in found.items():
        off = np.asarray([jax.device_get(_off(w, leaf)) for w, leaf in pairs], np.float64)
        rows.append(
            {
                "kind": name,
                "bits": bits,
                "relative_error": float(np.sqrt(off[:, 0].sum() / off[:, 1].sum())),
                "largest_error": float(off[:, 2].max()),
                "bytes_before": sum(w.nbytes for w, _ in pairs),
                "bytes_after": sum(leaf.nbytes for _, leaf in pairs),
            }
        )
    return rows


def _off(w: Any, leaf: Any) -> Any:
    """Squares of the change and of the weight, and the largest change."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def off(w: jax.Array, leaf: Any) -> tuple[jax.Array, ...]:
        w, change = w.astype(jnp.float32), w.astype(jnp.float32) - leaf.values()
        return (change**2).sum(), (w**2).sum(), jnp.abs(change).max()

    return off(w, leaf)


def _bytes(model: Model) -> int:
    return sum(x.nbytes for x in model.parameters().values())


def _print(found: dict[str, Any], json: bool) -> None:
    if json:
        return print_json(found)
    from flaxen.show import human_bytes, table

    shown = [
        {**row, **{f"bytes_{w}": human_bytes(row[f"bytes_{w}"]) for w in ("before", "after")}}
        for row in found["kinds"]
    ]
    for row in shown:
        row["relative_error"] = f"{row['relative_error']:.2%}"
        row["largest_error"] = f"{row['largest_error']:.2g}"
    if shown:
        titles = [name.replace("_", " ") for name in shown[0]]
        print_out(table(titles, [list(row.values()) for row in shown]))
    before, after = found["before"], found["after"]
    rows = [
        (
            f"perplexity of {found['tokens']} tokens",
            *(f"{x['perplexity']:.3f}" for x in (before, after)),
        ),
        ("weights", *(human_bytes(x["bytes"]) for x in (before, after))),
    ]
    if "decode" in before:
        rows.append(("decode, tokens/s", *(f"{x['decode']:.1f}" for x in (before, after))))
    return print_out(table(["measured", "before", "after"], rows, title=found["target"]))
