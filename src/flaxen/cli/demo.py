"""`flaxen demo`: the whole way with a real model, and a table of what was measured."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flaxen.cli.answer import answer
from flaxen.cli.options import Count, Source, about, enough_cpu_devices
from flaxen.cli.output import progress_bar, write_now
from flaxen.cli.train import step_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flaxen.model import Model

QUESTION = "What is the capital of France?"
TEXTS = Path(__file__).parent / "data"


def demo(
    model: Source,
    *,
    output: Annotated[str, about("Folder for everything that is written.")] = "demo-output",
    steps: Annotated[Count, about("Fine-tuning steps.")] = 30,
) -> None:
    """The whole way with a real model: answer, convert, shard, fine-tune, save."""
    from rich.console import Console

    from flaxen.show import human_bytes, peak_memory, table

    # Two virtual devices for the sharded part; the rest uses the first one.
    enough_cpu_devices("fsdp=2")
    folder, rows = Path(output), {}
    loaded, tok = _load(model, rows)
    _answer(loaded, tok, rows)
    _convert(loaded, tok, folder / "converted", rows)
    _shard(loaded, folder / "converted", rows)
    _tune(loaded, tok, folder, steps, rows)
    rows["peak memory"] = human_bytes(peak_memory())
    Console().print(
        table(["measured", ""], rows.items(), title=f"\nflaxen demo: {Path(model).stem}")
    )


def _load(source: str, rows: dict[str, Any]) -> tuple[Model, PreTrainedTokenizerFast]:
    import flaxen

    _heading(f"Loading {source}")
    start = time.perf_counter()
    with progress_bar("Loading") as progress:
        loaded = flaxen.load(source, dtype="float32", progress=progress)
    rows["load"] = f"{time.perf_counter() - start:.1f} s"
    return loaded, flaxen.tokenizer(source)


def _answer(model: Model, tok: PreTrainedTokenizerFast, rows: dict[str, Any]) -> None:
    from flaxen.text import encode_chat

    _heading(QUESTION)
    ids = encode_chat(tok, [{"role": "user", "content": QUESTION}])
    answer(model, tok, ids, max_tokens=32, sampling={}, write=write_now)
    write_now("\n")
    # Once more, now that everything is compiled.
    found = answer(model, tok, ids, max_tokens=32, sampling={})
    told = found.as_dict()
    rows["prefill"] = f"{told['prefill_speed']:.0f} tokens/s"
    rows["decode"] = f"{told['decode_speed']:.0f} tokens/s"


def _convert(
    model: Model, tok: PreTrainedTokenizerFast, folder: Path, rows: dict[str, Any]
) -> None:
    import flaxen

    _heading(f"Converting to a Hugging Face folder: {folder}")
    model.save(folder, tokenizer=tok)
    again = folder.with_name("saved-again")
    flaxen.load(str(folder)).save(again)
    same = all(
        (again / file.name).read_bytes() == file.read_bytes()
        for file in folder.glob("*.safetensors")
    )
    rows["loaded and saved again"] = "every byte the same" if same else "bytes differ"


def _shard(model: Model, folder: Path, rows: dict[str, Any]) -> None:
    import flaxen

    _heading("Loading that folder over two devices")
    sharded = flaxen.load(str(folder), mesh="fsdp=2")
    ids = np.random.default_rng(0).integers(0, 1000, (2, 32))
    apart = float(np.abs(np.asarray(model(ids).logits) - np.asarray(sharded(ids).logits)).max())
    rows["logits, one device against two"] = f"differ by {apart:.1e} at most"


def _tune(
    model: Model, tok: PreTrainedTokenizerFast, folder: Path, steps: int, rows: dict[str, Any]
) -> None:
    from flaxen.show import loss_picture
    from flaxen.train import Settings, fit
    from flaxen.tune import add_lora, merge

    _heading("Fine-tuning on chapters of Moby-Dick")
    before = perplexity(model, tok, TEXTS / "moby_dick_test.txt")
    settings = Settings(steps=steps, batch_size=4, sequence_length=256, learning_rate=5e-4, seed=0)
    start = time.perf_counter()
    tuned = add_lora(model, rank=8, alpha=16.0)
    with step_bar() as on_step:
        tuned = fit(
            tuned,
            tok,
            str(TEXTS / "moby_dick_train.txt"),
            settings,
            str(folder / "run"),
            on_step=on_step,
        )
    rows["fine-tuning"] = f"{steps} steps in {time.perf_counter() - start:.0f} s"
    merged = merge(tuned)
    merged.save(folder / "tuned", tokenizer=tok)
    after = perplexity(merged, tok, TEXTS / "moby_dick_test.txt")
    rows["perplexity of two other chapters"] = f"{before:.1f} before, {after:.1f} after"
    rows["loss picture"] = str(loss_picture(folder / "run/log.jsonl", folder / "run/loss.png"))


def perplexity(model: Model, tok: PreTrainedTokenizerFast, text: Path, length: int = 256) -> float:
    """exp of the mean -log p over the tokens of a text, in rows of `length`."""
    from flaxen.text import encode

    ids = np.array(encode(tok, text.read_text(encoding="utf-8")))
    rows = ids[: len(ids) // length * length].reshape(-1, length)
    losses = [np.asarray(model(row[None], labels=row[None]).loss) for row in rows]
    return math.exp(np.mean(losses))


def _heading(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(f"\n{text}", style="bold"))
