"""Write a golden case of a model that sees, as `make_golden.py` does for texts alone. Run it in the
torch environment:

    .venv-torch/bin/python conformance/make_golden_pictures.py dinov2 tests/data/golden CONFIG

CONFIG is a config.json (text, or a file) of which only what differs from the class defaults need
stand there. A model of pictures alone gets `pixel_values`; a language model that sees two pictures
in a text as well, with the words that keep places for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import make_golden
import numpy as np
import torch
import transformers

GRIDS = ("qwen2_vl", "qwen2_5_vl")
SIZED = ("pixtral",)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def pictures(config: Any) -> tuple[dict[str, np.ndarray], list[int]]:
    """Two pictures as this model takes them, and how many tokens each becomes."""
    v = config.vision_config
    if config.model_type in GRIDS:
        grids = np.array([[1, 6, 4], [1, 4, 8]], np.int32)
        width = v.in_channels * v.temporal_patch_size * v.patch_size**2
        given = {"pixel_values": pixels(int(grids.prod(1).sum()), width), "image_grid_thw": grids}
        return given, (grids.prod(1) // v.spatial_merge_size**2).tolist()
    if v.model_type in SIZED:
        merge, p = getattr(config, "spatial_merge_size", 1), v.patch_size
        grid = np.array([[6, 4], [4, 2]], np.int32)
        given = {"pixel_values": pixels(2, v.num_channels, 6 * p, 4 * p), "image_sizes": grid * p}
        return given, (grid.prod(1) // merge**2).tolist()
    count = (v.image_size // v.patch_size) ** 2
    if config.model_type == "gemma3":
        count = config.mm_tokens_per_image
    if getattr(config, "vision_feature_select_strategy", "") == "full":
        count += v.model_type == "clip_vision_model"
    elif config.model_type == "llava":
        count -= v.model_type != "clip_vision_model"
    return {"pixel_values": pixels(2, v.num_channels, v.image_size, v.image_size)}, [count, count]


def seeing_inputs(config: Any) -> dict[str, np.ndarray]:
    """Two rows with a picture each, the shorter one padded on the left."""
    rng, token = np.random.default_rng(0), config.image_token_id
    words = lambda n: rng.integers(3, 100, n).tolist()
    given, counts = pictures(config)
    around = ((3, counts[0], 6), (5, counts[1], 3))
    rows = [[*words(before), *[token] * n, *words(after)] for before, n, after in around]
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows], np.int32)
    mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows], np.int32)
    # Nothing is predicted from a padded slot.
    told = (mask == 1) & np.pad(mask, [(0, 0), (1, 0)])[:, :-1].astype(bool) & (ids != token)
    labels = np.where(told, ids, -100).astype(np.int32)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **given}


def extra(config: Any, ids: np.ndarray) -> dict[str, torch.Tensor]:
    """What some models want to be told besides: which tokens keep places."""
    kinds = torch.tensor(ids == config.image_token_id).long()
    names = {"gemma3": "token_type_ids", **dict.fromkeys(GRIDS, "mm_token_type_ids")}
    name = names.get(config.model_type)
    return {} if name is None else {name: kinds}


def tensors(x: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    made = {k: torch.tensor(v) for k, v in x.items()}
    return {k: v if v.is_floating_point() else v.long() for k, v in made.items()}


def greedy(model: Any, x: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
    """12 greedy tokens by full runs, and the smallest gap between the best two scores."""
    t = tensors({k: v for k, v in x.items() if k not in ("labels", "position_ids")})
    ids, mask, margin = t.pop("input_ids"), t.pop("attention_mask"), float("inf")
    axes = model.config.model_type in GRIDS
    for _ in range(12):
        more = extra(model.config, ids.numpy())
        if not axes:
            more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, **t, **more)
        best = out.logits[:, -1].topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        ids = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids.numpy().astype(np.int32), margin


def seeing_outputs(model: Any, x: dict[str, np.ndarray]) -> dict[str, Any]:
    t, mask = tensors(x), x["attention_mask"][..., None]
    more = extra(model.config, x["input_ids"])
    if model.config.model_type not in GRIDS:
        x["position_ids"] = np.maximum(np.cumsum(x["attention_mask"], 1) - 1, 0).astype(np.int32)
        more["position_ids"] = torch.tensor(x["position_ids"]).long()
    out = model(use_cache=False, **t, **more)
    out.loss.backward()
    with torch.no_grad():
        found = model.get_image_features(
            **{k: v for k, v in t.items() if k in ("pixel_values", "image_grid_thw", "image_sizes")}
        ).pooler_output
        parts = [part.reshape(-1, part.shape[-1]) for part in found]
        ids, margin = greedy(model, x)
    return {
        "logits": out.logits.detach().numpy() * mask,
        "image_embeds": torch.cat(parts).numpy(),
        "loss": np.float32(out.loss.item()),
        "gen_sequences": ids,
        "gen_min_margin": np.float32(margin),
    }


def image_outputs(model: Any, x: dict[str, np.ndarray]) -> dict[str, Any]:
    out = model(**tensors(x), output_hidden_states=True)
    out.loss.backward()
    found = {
        "logits": out.logits.detach().numpy(),
        "hidden_1": out.hidden_states[1].detach().numpy(),
        "loss": np.float32(out.loss.item()),
    }
    other = torch.tensor(pixels(1, 3, *[n + 8 for n in x["pixel_values"].shape[2:]]))
    with torch.no_grad():
        try:
            found["other_logits"] = model(pixel_values=other).logits.numpy()
        except ValueError:
            found["other_logits"] = model(
                pixel_values=other, interpolate_pos_encoding=True
            ).logits.numpy()
    x["other_pixel_values"] = other.numpy()
    return found


def main() -> None:
    name, folder, text = sys.argv[1:4]
    given = json.loads(Path(text).read_text() if text.endswith(".json") else text)
    kwargs = {k: v for k, v in given.items() if k not in ("model_type", "architectures")}
    config = transformers.CONFIG_MAPPING[given["model_type"]](**kwargs)
    sees = hasattr(config, "vision_config")
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForImageClassification"
    model, rows, _ = make_golden.built(config, "eager", getattr(transformers, auto))
    full = {k: v for k, v in model.config.to_dict().items() if k not in make_golden.GENERIC}
    full["architectures"] = [type(model).__name__]
    if sees:
        x = seeing_inputs(config)
        out = seeing_outputs(model, x)
    else:
        size = config.image_size
        x = {"pixel_values": pixels(2, 3, size, size), "labels": np.array([1, 0], np.int32)}
        out = image_outputs(model, x)
        full["num_labels"] = config.num_labels
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        grads = make_golden.checkpoint(model, Path(place))
    arrays = {k: np.asarray(v) for k, v in {**x, **out}.items()}
    arrays = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in arrays.items()}
    about = {
        "case": name,
        "kind": "seeing" if sees else "vision",
        "model_type": given["model_type"],
        "architecture": type(model).__name__,
        "config_class": type(config).__name__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "attention": "eager",
        "config": full,
        "config_kwargs": kwargs,
        "config_legacy": None,
        "tied": dict(getattr(model, "all_tied_weights_keys", None) or {}),
        "uses_position_ids": None,
        "tensors": rows,
        "grad_norms": {k: float(f"{np.linalg.norm(g):.6g}") for k, g in sorted(grads.items())},
        "arrays": {k: [str(v.dtype), list(v.shape)] for k, v in arrays.items()},
        "measured": {"logits_std": round(float(out["logits"].std()), 3)},
        "notes": [],
    }
    if sees:
        about["measured"]["gen_min_margin"] = round(float(out["gen_min_margin"]), 4)
    lines = ",\n".join(f" {json.dumps(k)}: {make_golden._rows(v)}" for k, v in about.items())
    (Path(folder) / f"{name}.json").write_text("{\n" + lines + "\n}\n")
    np.savez_compressed(Path(folder) / f"{name}.npz", **arrays)
    print(json.dumps({"case": name, **about["measured"]}))


if __name__ == "__main__":
    main()
