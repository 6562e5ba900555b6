"""The other side of `bench/run.py`: Transformers on torch, eager, sdpa attention."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import transformers
from shapes import NEW, PROMPT, STEP, batch_of, folder
from transformers import AutoModelForCausalLM, DynamicCache
from worker import NOTES, serve


def load(dtype: str) -> torch.nn.Module:
    kind = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(
        folder(dtype), dtype=kind, attn_implementation="sdpa"
    )


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 32000, (batch, length), generator=torch.Generator().manual_seed(0))


def decode(dtype: str, batch: int) -> Callable[[], float]:
    """A bare loop around the model, which is faster than `generate`."""
    model, ids = load(dtype).eval(), prompt(batch, PROMPT)

    @torch.inference_mode()
    def once() -> float:
        cache = DynamicCache(config=model.config)
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        start = time.perf_counter()
        for _ in range(NEW):
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - start

    return once


def prefill(dtype: str, length: int) -> Callable[[], float]:
    model, ids = load(dtype).eval(), prompt(1, length)

    @torch.inference_mode()
    def once() -> float:
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return time.perf_counter() - start

    return once


def train(
    dtype: str, batch: int, length: int, masters: str | None = None, compiled: bool = False
) -> Callable[[], float]:
    """Seconds for one AdamW step: weights and moments in `masters`, arithmetic in `dtype`, by
    autocast where they differ; by default all in `dtype`, less work than float32 masters.
    """
    model = load(masters or dtype).train()
    ids = torch.from_numpy(batch_of(batch, length))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=STEP["learning_rate"],
        betas=(STEP["beta1"], STEP["beta2"]),
        eps=STEP["eps"],
        weight_decay=STEP["weight_decay"],
        fused=True,
    )
    narrow = torch.autocast(
        "cpu", getattr(torch, dtype), enabled=masters is not None and masters != dtype
    )
    forward = torch.compile(model) if compiled else model

    def once() -> float:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with narrow:
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds = time.perf_counter() - start
        NOTES["loss"] = loss.item()
        return seconds

    return once


if __name__ == "__main__":
    about = f"torch {torch.__version__}, transformers {transformers.__version__}"
    serve({"decode": decode, "prefill": prefill, "train": train}, about)
