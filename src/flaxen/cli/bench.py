"""`flaxen bench`: prefill and decode speed of one model on this machine."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flaxen.cli.options import Count, Json, Loading, Source, about
from flaxen.cli.output import print_json, print_out, remark

if TYPE_CHECKING:
    from flaxen.model import Model


def bench(
    model: Source,
    *,
    batch: Annotated[list[int] | None, about("Rows at once; may be repeated.")] = None,
    prompt: Annotated[list[int] | None, about("Prompt lengths; may be repeated.")] = None,
    new: Annotated[Count, about("Tokens to decode.")] = 32,
    repeat: Annotated[Count, about("Runs after one to warm up; the median counts.")] = 3,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Measure prefill and decode on this machine.

    Prompts are random tokens and decoding is greedy. Compilation is not counted.
    """
    from flaxen.show import human_bytes, peak_memory, table

    start = time.perf_counter()
    loaded = loading.load(model)
    load_seconds = time.perf_counter() - start
    rows = []
    for size in batch or (1, 8):
        for length in prompt or (128, 1024):
            rows.append(measured(loaded, size, length, new, repeat))
            if not json:
                remark(f"batch {size}, prompt {length} measured")
    if json:
        print_json({"load_seconds": load_seconds, "peak_bytes": peak_memory(), "runs": rows})
        return
    titles = [name.replace("_", " ") for name in rows[0]]
    print_out(table(titles, [row.values() for row in rows]))
    remark(f"loaded in {load_seconds:.2f} s, peak memory {human_bytes(peak_memory())}")


def measured(model: Model, batch: int, length: int, new: int, repeat: int) -> dict[str, Any]:
    """Medians of `repeat` runs after one that compiles."""
    ids = np.random.default_rng(0).integers(0, 100, (batch, length))
    runs = [_once(model, ids, new) for _ in range(repeat + 1)][1:]
    prefill, decode = (statistics.median(times) for times in zip(*runs, strict=True))
    return {
        "batch": batch,
        "prompt": length,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch * length / prefill,
        "decode_tokens_per_second": batch * (new - 1) / decode,
    }


def _once(model: Model, ids: np.ndarray, new: int) -> tuple[float, float]:
    """Seconds until the first new token, and from there to the last."""
    from flaxen.generate import stream

    start = time.perf_counter()
    steps = iter(stream(model, ids, max_new_tokens=new, eos_token_id=()))
    np.asarray(next(steps))
    first = time.perf_counter()
    for step in steps:
        np.asarray(step)
    return first - start, time.perf_counter() - first
