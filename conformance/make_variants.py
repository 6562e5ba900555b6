"""Makes variants of models with Transformers on torch, with random weights, and writes what they
compute: one folder for each. `conformance/variants.py` runs it in the torch environment:

    .venv-torch/bin/python conformance/make_variants.py JOBS.json FOLDER

A line of JSON on the standard output tells of each: its folder, or why there is no such model.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_golden_pictures as pictures
import numpy as np
import torch
import transformers
from torch.nn.functional import pad
from variant_changes import Change, changed, possible

STEPS, LENGTH = 8, 12
Arrays = dict[str, np.ndarray]


def built(job: dict[str, Any]) -> Any:
    """The model, with weights that keep the size of what goes in and biases away from zero."""
    fields = changed(job["config"], job["changes"])
    config = transformers.CONFIG_MAPPING[job["model_type"]](**fields)
    # Eager attention adds Falcon's slopes twice.
    attention = "sdpa" if getattr(config, "alibi", False) is True else "eager"
    torch.manual_seed(job["seed"])
    cls = getattr(transformers, job["architecture"])
    model = cls._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(job["seed"])
    buffers = [
        (n, b) for n, b in model.named_buffers() if n.endswith("bias") and b.dtype.is_floating_point
    ]
    with torch.no_grad():
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for name, weight in [*trained, *buffers]:
            noise = torch.randn(weight.shape, generator=draw)
            if weight.ndim >= 2 and not name.endswith("bias"):
                inputs = math.prod(weight.shape[1:]) if weight.ndim > 3 else weight.shape[-1]
                weight.copy_(noise / math.sqrt(inputs))
            else:
                weight.add_(0.2 * noise)
    model.tie_weights()
    return model


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def accepts(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def greedy(
    run: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor, never: tuple[int, ...] = ()
) -> Arrays:
    """The next tokens by full runs, up to one that may never come, and by how much each was the
    best.
    """
    gaps = [torch.zeros(len(ids), 0)]
    for _ in range(STEPS):
        best = run(ids, mask)[:, -1].topk(2)
        if torch.isin(best.indices[:, 0], torch.tensor(never, dtype=torch.long)).any():
            break
        gaps.append(best.values[:, :1] - best.values[:, 1:])
        ids = torch.cat([ids, best.indices[:, :1]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    gaps = torch.cat(gaps, 1).numpy()
    return {"gen/tokens": ids.numpy(), "gen/gaps": gaps} if gaps.size else {}


def texts(model: Any, seed: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask; the last row is padded on the left."""
    config = model.config.get_text_config()
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(4, config.vocab_size, (rows, LENGTH)))
    mask = torch.ones_like(ids)
    mask[-1, :3] = 0
    return torch.where(mask == 1, ids, getattr(config, "pad_token_id", None) or 0), mask


def causal(model: Any, seed: int) -> Arrays:
    """Rows each by itself: biases of recurrent layers would carry padding into their states."""
    ids, mask = texts(model, seed)

    def alone(ids: torch.Tensor) -> torch.Tensor:
        return model(ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).logits

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = [alone(row[real == 1])[0] for row, real in zip(ids, mask, strict=True)]
        rows = [pad(x, (0, 0, len(row) - len(x), 0)) for row, x in zip(ids, found, strict=True)]
        return torch.stack(rows)

    given = {"in/input_ids": ids, "in/attention_mask": mask}
    if accepts(model, "position_ids"):
        given["in/position_ids"] = positions(mask)
    return as_arrays({**given, "out/logits": run(ids, mask)}) | greedy(run, ids, mask)


OUTPUTS = (
    "logits",
    "last_hidden_state",
    "pooler_output",
    "start_logits",
    "end_logits",
    "prediction_logits",
    "seq_relationship_logits",
    "logits_per_image",
    "text_embeds",
    "image_embeds",
)


def outputs(out: Any) -> dict[str, torch.Tensor]:
    return {f"out/{name}": out[name] for name in OUTPUTS if out.get(name) is not None}


def encoder(model: Any, seed: int) -> Arrays:
    ids, mask = texts(model, seed)
    given = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1 and accepts(model, "token_type_ids"):
        given["token_type_ids"] = torch.from_numpy(
            np.random.default_rng(seed).integers(0, 2, ids.shape)
        )
    if type(model).__name__.endswith("ForMultipleChoice"):
        given = {k: x.reshape(1, 2, -1) for k, x in given.items()}
    return as_arrays({f"in/{k}": x for k, x in given.items()} | outputs(model(**given)))


def text_tower(model: Any, seed: int) -> Arrays:
    ids, _ = texts(model, seed)
    length = min(LENGTH, model.config.max_position_embeddings)
    return as_arrays({"in/input_ids": ids[:, :length]} | outputs(model(ids[:, :length])))


def pixels(config: Any, seed: int) -> torch.Tensor:
    shape = (2, config.num_channels, config.image_size, config.image_size)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def vision(model: Any, seed: int) -> Arrays:
    seen = pixels(model.config, seed)
    return as_arrays({"in/pixel_values": seen} | outputs(model(seen)))


def two_towers(model: Any, seed: int) -> Arrays:
    ids, _ = texts(model, seed)
    given = {
        "input_ids": ids[:, : model.config.text_config.max_position_embeddings],
        "pixel_values": pixels(model.config.vision_config, seed),
    }
    return as_arrays({f"in/{k}": x for k, x in given.items()} | outputs(model(**given)))


def answers(model: Any, seed: int) -> Arrays:
    """Encoder-decoders of text and of sound."""
    rng, config = np.random.default_rng(seed), model.config
    if config.model_type == "whisper":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        read = {"input_features": torch.from_numpy(rng.normal(size=shape).astype(np.float32))}
    else:
        ids, mask = texts(model, seed)
        read = {"input_ids": ids, "attention_mask": mask}
    said = torch.from_numpy(rng.integers(4, config.vocab_size, (2, 7)))
    run = lambda said, mask=None: model(**read, decoder_input_ids=said, use_cache=False)
    out = run(said)
    found = as_arrays({f"in/{k}": x for k, x in {**read, "decoder_input_ids": said}.items()})
    if out.get("logits") is None:
        return found | as_arrays(outputs(out))
    start = said[:, : 1 + seed % 3].clone()
    start[:, 0] = config.decoder_start_token_id
    logits = lambda said, mask: run(said).logits
    new = greedy(logits, start, torch.ones_like(start)) | {"gen/decoder_input_ids": start.numpy()}
    return found | as_arrays({"out/logits": out.logits}) | new


def seeing(model: Any, seed: int) -> Arrays:
    config = model.config
    x = pictures.seeing_inputs(config)
    x.pop("labels")
    t = pictures.tensors(x)
    ids, mask = t.pop("input_ids"), t.pop("attention_mask")

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        more = pictures.extra(config, ids.numpy())
        if config.model_type not in pictures.GRIDS:
            more["position_ids"] = positions(mask)
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **t, **more).logits

    told = {f"in/{k}": v for k, v in x.items()}
    if config.model_type not in pictures.GRIDS:
        told["in/position_ids"] = positions(mask).numpy()
    # A token that stands for a picture would ask for one more.
    places = tuple(n for name in PLACES if (n := getattr(config, name, None)) is not None)
    return told | as_arrays({"out/logits": run(ids, mask)}) | greedy(run, ids, mask, places)


PLACES = ("image_token_id", "video_token_id")

KINDS = {
    "causal": causal,
    "encoder": encoder,
    "text_tower": text_tower,
    "vision": vision,
    "two_towers": two_towers,
    "answers": answers,
    "seeing": seeing,
}


def as_arrays(found: dict[str, torch.Tensor]) -> Arrays:
    return {name: x.detach().numpy() for name, x in found.items()}


def made(job: dict[str, Any], folder: Path) -> None:
    """
    Raises:
        ArithmeticError: what it computes is not finite.
    """
    model = built(job)
    with torch.no_grad():
        arrays = KINDS[job["kind"]](model, job["seed"])
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ArithmeticError(f"{name} is not finite")
    arrays = {k: x.astype(np.int32) if x.dtype.kind == "i" else x for k, x in arrays.items()}
    model.save_pretrained(folder)
    np.savez(folder / "arrays.npz", **arrays)


def attempts(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The job as it was done: without those changes that Transformers has no model for."""
    changes = [(tuple(path), value) for path, value in job["changes"]]
    kept, left = possible(changes, lambda changes: failure(job, changes, folder))
    why = failure(job, kept, folder)
    told = {**job, "changes": kept, "impossible": left, "folder": str(folder)}
    return told if why is None else {**told, "failed": why}


def failure(job: dict[str, Any], changes: list[Change], folder: Path) -> str | None:
    """What Transformers says of a model with these changes, if it has none."""
    try:
        made({**job, "changes": changes}, folder)
    except Exception as error:  # whatever a model of theirs may raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def main(jobs: str, place: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for job in json.loads(Path(jobs).read_text()):
        print(json.dumps(attempts(job, Path(place) / job["name"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
