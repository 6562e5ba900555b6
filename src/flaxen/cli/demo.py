"""`flaxen demo`: the whole way with a real model, and a table of what was measured."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flaxen.cli.answer import answer
from flaxen.cli.options import Count, Source, about, enough_cpu_devices
from flaxen.cli.output import print_out, write_now

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
    print_out(table(["measured", ""], rows.items(), title=f"\nflaxen demo: {Path(model).stem}"))


def _load(source: str, rows: dict[str, Any]) -> tuple[Model, PreTrainedTokenizerFast]:
    import flaxen

    _heading(f"Loading {source}")
    start = time.perf_counter()
    loaded = flaxen.load(source, dtype="float32")
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
    from flaxen.train import train

    _heading("Fine-tuning on chapters of Moby-Dick")
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    start = time.perf_counter()
    result = train(
        model,
        tok,
        TEXTS / "moby_dick_train.txt",
        eval_data=TEXTS / "moby_dick_test.txt",
        output=run,
        steps=steps,
        batch_size=2,
        seq_len=256,
        learning_rate=5e-4,
        lora_rank=8,
        progress=True,
    )
    rows["fine-tuning"] = (
        f"{steps} steps in {time.perf_counter() - start:.0f} s, "
        f"{result.tokens_per_second:.0f} tokens/s"
    )
    before, *_, after = result.perplexities.values()
    rows["perplexity of two other chapters"] = f"{before:.1f} before, {after:.1f} after"
    rows["tuned model, adapters merged"] = str(result.model_path)
    rows["loss picture"] = str(result.picture_path)


def _heading(text: str) -> None:
    from rich.text import Text

    print_out(Text(f"\n{text}", style="bold"))
