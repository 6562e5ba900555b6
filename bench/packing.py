"""Learned tokens a second: packed rows, padded rows, and rows of about one length.

    python bench/packing.py [--quick] [--write]

A small model is trained on documents with many short and few long ones; the ways take turns. With
--write the table goes to bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np
from results import RESULTS, write_section

from flaxen.pretrained import from_config
from flaxen.train import OBJECTIVES, TrainConfig
from flaxen.train.data.batches import Batches, make_batches
from flaxen.train.data.examples import Example
from flaxen.train.step import make_trainer, place_batch

WAYS = {
    "padded": {"packing": False},
    "by length": {"packing": False, "group_by_length": True},
    "packed": {"packing": True},
}


def documents(count: int, seq_len: int, vocab: int) -> list[Example]:
    """Lengths are log-normal: half of them below an eighth of a row."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(seq_len / 8), 1.0, count)).astype(int)
    made = (draw.integers(1, vocab, n).astype(np.int32) for n in lengths.clip(4, seq_len))
    return [Example(ids, ids) for ids in made]


class Way:
    """A run that is measured step by step."""

    def __init__(self, model: Any, settings: dict[str, Any], found: list[Example]):
        config = TrainConfig(output="", progress=False, **settings)
        self.batches: Batches = make_batches(
            found,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            packing=config.packing,
            by_length=config.group_by_length,
        )
        self.runtime = model.runtime
        objective = OBJECTIVES["causal"](config)
        self.trainer, self.state = make_trainer(
            model.module, model.runtime, config, 1000, objective=objective
        )
        self.next = 0
        shapes = {}
        for step in range(self.batches.per_epoch):
            batch = self.batches.batch_at(step)
            shapes.setdefault(batch["ids"].shape, batch)
        self.programs = len(shapes)
        self.compiling = sum(map(self.run, shapes.values()))

    def run(self, batch: dict[str, np.ndarray]) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        placed = place_batch(batch, self.runtime)
        self.state, metrics = self.trainer.step(self.state, self.trainer.frozen, placed)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    def turn(self, steps: int) -> tuple[float, int, int]:
        """Seconds, learned tokens and slots of some steps."""
        batches = [self.batches.batch_at(self.next + i) for i in range(steps)]
        self.next += steps
        tokens = sum(int((batch["targets"] != -100).sum()) for batch in batches)
        return sum(map(self.run, batches)), tokens, sum(batch["ids"].size for batch in batches)


def measured(quick: bool) -> str:
    """A table in Markdown."""
    seq_len, count, steps, turns = (64, 100, 3, 1) if quick else (512, 1000, 4, 5)
    width = 32 if quick else 128
    model = from_config(
        {
            "model_type": "llama",
            "vocab_size": 512 if quick else 4096,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": 2 if quick else 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    found = documents(count, seq_len, 500)
    common = {"seq_len": seq_len, "batch_size": 8, "learning_rate": 1e-4}
    ways = {name: Way(model, common | how, found) for name, how in WAYS.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    full: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            seconds, tokens, slots = way.turn(steps)
            rates[name].append(tokens / seconds)
            full[name].append(tokens / slots)
    base = statistics.median(rates["padded"])
    lengths = [len(example.ids) for example in found]
    lines = [
        f"{count} documents of {min(lengths)} to {max(lengths)} tokens, median "
        f"{statistics.median(lengths):.0f}, in rows of {seq_len}; {jax.default_backend()}.",
        "",
        "| rows | learned tokens/s | to padded | slots that count | programs | compiling |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, way in ways.items():
        rate = statistics.median(rates[name])
        lines.append(
            f"| {name} | {rate:,.0f} | {rate / base:.2f} x | {statistics.mean(full[name]):.0%} | "
            f"{way.programs} | {way.compiling:.1f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--write", action="store_true", help="into bench/RESULTS.md")
    given = parser.parse_args()
    table = measured(given.quick)
    print(table)
    if given.write:
        write_section(RESULTS, "packing", "## Packing\n\n" + table)


if __name__ == "__main__":
    main()
