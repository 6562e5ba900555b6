"""Write a golden case: a tiny model of Transformers with weights made from their names, and what
torch computes with it. Run it in the torch environment:

    .venv-torch/bin/python conformance/make_golden.py olmo3 tests/data/golden '{"model_type": ...}'

The third argument is a config.json (text, or a file) of which only what differs from the class
defaults need stand there; a fourth one may name another attention than "eager": "sdpa" for Falcon
with ALiBi, to which eager attention adds its slopes twice. `tests/data/golden/README.md` says what
the files hold.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import golden

BASES = {"A_log": (0.7, 1.4), "D": (1.0, 0.4), "dt_bias": (-2.0, 2.0), "sinks": (0.0, 4.0)}

GENERIC = {
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
}
"""Keys of every config, which say nothing of these models."""


def is_norm(key: str) -> bool:
    """Whether this is of a norm, by its name in any family."""
    return "norm" in key.lower() or ".ln_" in key


def numbers(key: str, array: np.ndarray, offset: bool) -> tuple[float, float]:
    """Base and scale of a weight: products keep the size of what goes in, norms are near one."""
    name, last = key.split(".")[-2:] if "." in key else ("", key)
    if last in BASES:
        return BASES[last]
    if array.ndim < 2:
        norm = is_norm(key) and "bias" not in last
        return (0.0 if offset else 1.0, 0.4) if norm else (0.0, 0.2)
    if any(part in key for part in ("embed_tokens", "wte", "word_embeddings", "embeddings.weight")):
        return 0.0, 2.0
    if array.ndim == 3 and array.shape[1] == 1:
        fan_in = array.shape[2]
    elif array.ndim > 3:
        fan_in = math.prod(array.shape[1:])
    else:
        fan_in = array.shape[1]
    factor = 3.0 if name in ("gate", "router") else 1.5 if key.startswith("lm_head") else 1.0
    return 0.0, round(factor * math.sqrt(12 / fan_in), 4)


def checkpoint(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """The model as it lies on disk."""
    model.save_pretrained(folder)
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def built(
    config: Any, attention: str, auto: Any = transformers.AutoModelForCausalLM
) -> tuple[Any, list[Any], dict[str, np.ndarray]]:
    """The model with its weights from the recipe, the rows that tell them, and they themselves."""
    torch.manual_seed(0)
    fresh = auto.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for name, p in fresh.named_parameters():
            if is_norm(name) and p.ndim == 1 and "bias" not in name:
                offset = bool((p == 0).all())
                break
        else:
            offset = False
    with tempfile.TemporaryDirectory() as place:
        like = checkpoint(fresh, Path(place))
        rows = [
            [key, list(x.shape), "float32", *numbers(key, x, offset)]
            for key, x in sorted(like.items())
        ]
        weights = {
            key: golden.weight(key, shape, base, scale, dtype)
            for key, shape, dtype, base, scale in rows
        }
        for file in Path(place).glob("*.safetensors*"):
            file.unlink()
        save_file(weights, Path(place) / "model.safetensors", metadata={"format": "pt"})
        model, info = auto.from_pretrained(
            place, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], (kind, info[kind])
    with tempfile.TemporaryDirectory() as place:
        back = checkpoint(model, Path(place))
    assert back.keys() == weights.keys(), back.keys() ^ weights.keys()
    assert all(np.array_equal(back[key], weights[key]) for key in back)
    return model.eval(), rows, weights


def inputs(vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(3, vocab, shape).astype(np.int32)
    mask = np.ones((3, 12), np.int32)
    mask[1, :4], mask[2, 9:] = 0, 0
    ids, gen_mask = draw(3, 12), np.ones((2, 12), np.int32)
    gen_mask[1, :4] = 0
    labels = np.where(mask == 1, ids, -100).astype(np.int32)
    labels[0, 5] = -100
    # Nothing is predicted from padding, whose state every library makes up in its own way.
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return {
        "input_ids": np.where(mask == 1, ids, 0).astype(np.int32),
        "attention_mask": mask,
        "full_input_ids": draw(2, 12),
        "long_input_ids": draw(1, 40),
        "position_ids": np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32),
        "labels": labels,
        "gen_input_ids": np.where(gen_mask == 1, draw(2, 12), 0).astype(np.int32),
        "gen_attention_mask": gen_mask,
    }


def greedy(model: Any, ids: np.ndarray, mask: np.ndarray, positions: bool) -> tuple[Any, float]:
    """16 greedy tokens by full runs, and the smallest gap between the best two scores."""
    ids, mask, margin = torch.tensor(ids).long(), torch.tensor(mask).long(), math.inf
    for _ in range(16):
        extra = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {}
        scores = model(ids, attention_mask=mask, use_cache=False, **extra).logits[:, -1]
        best = scores.topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids.numpy().astype(np.int32), margin


def outputs(model: Any, x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], bool]:
    t = {key: torch.tensor(value).long() for key, value in x.items()}
    mask = x["attention_mask"][..., None]
    out: dict[str, Any] = {}
    with torch.no_grad():
        run = lambda **given: model(use_cache=False, **given)
        padded = {"input_ids": t["input_ids"], "attention_mask": t["attention_mask"]}
        out["logits"] = run(**padded).logits.numpy() * mask
        try:
            moved = run(**padded, position_ids=t["position_ids"] + 1).logits.numpy() * mask
            at = run(**padded, position_ids=t["position_ids"]).logits.numpy() * mask
            plus = run(**padded, position_ids=2 * t["position_ids"]).logits.numpy() * mask
            uses = bool(max(np.abs(moved - at).max(), np.abs(plus - at).max()) > 1e-4)
        except TypeError:
            uses, at = False, None
        if uses:
            out["logits_pos"] = at
        full = run(input_ids=t["full_input_ids"], output_hidden_states=True)
        out["full_logits"], out["full_hidden_1"] = (
            full.logits.numpy(),
            full.hidden_states[1].numpy(),
        )
        out["long_logits"] = run(input_ids=t["long_input_ids"]).logits.numpy()
        ids, margin = greedy(model, x["gen_input_ids"], x["gen_attention_mask"], uses)
    out["gen_sequences"], out["gen_min_margin"] = ids, np.float32(margin)
    return out, uses


def gradients(
    model: Any, x: dict[str, np.ndarray], uses: bool
) -> tuple[np.ndarray, dict[str, float]]:
    """The loss, and the norm of its gradient by hub key: a model of gradients, saved."""
    t = {key: torch.tensor(value).long() for key, value in x.items()}
    extra = {"position_ids": t["position_ids"]} if uses else {}
    out = model(
        t["input_ids"],
        attention_mask=t["attention_mask"],
        labels=t["labels"],
        use_cache=False,
        **extra,
    )
    out.loss.backward()
    with torch.no_grad():
        for p in [*model.parameters(), *model.buffers()]:
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    with tempfile.TemporaryDirectory() as place:
        grads = checkpoint(model, Path(place))
    norms = {key: float(f"{np.linalg.norm(g):.6g}") for key, g in sorted(grads.items())}
    # Where rounding is all there is, as of a key's bias without a rope, no norm is to be met.
    return np.float32(out.loss.item()), {key: norm for key, norm in norms.items() if norm > 1e-6}


def case(name: str, given: dict[str, Any], folder: Path, attention: str = "eager") -> None:
    kwargs = {k: v for k, v in given.items() if k not in ("model_type", "architectures")}
    config = transformers.CONFIG_MAPPING[given["model_type"]](**kwargs)
    model, rows, _ = built(config, attention)
    full = {k: v for k, v in model.config.to_dict().items() if k not in GENERIC}
    full["architectures"] = [type(model).__name__]
    x = inputs(config.vocab_size)
    out, uses = outputs(model, x)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    loss, norms = gradients(model, x, uses)
    arrays = {k: np.asarray(v) for k, v in {**x, **out, "loss": loss}.items()}
    arrays = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in arrays.items()}
    about = {
        "case": name,
        "kind": "causal",
        "model_type": given["model_type"],
        "architecture": type(model).__name__,
        "config_class": type(config).__name__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "attention": attention,
        "config": full,
        "config_kwargs": kwargs,
        "config_legacy": None,
        "tied": tied,
        "uses_position_ids": uses,
        "tensors": rows,
        "grad_norms": norms,
        "arrays": {k: [str(v.dtype), list(v.shape)] for k, v in arrays.items()},
        "measured": {
            "logits_std": round(float(out["full_logits"].std()), 3),
            "gen_min_margin": round(float(out["gen_min_margin"]), 4),
        },
        "notes": [],
    }
    lines = ",\n".join(f" {json.dumps(k)}: {_rows(v)}" for k, v in about.items())
    (folder / f"{name}.json").write_text("{\n" + lines + "\n}\n")
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    print(json.dumps({"case": name, **about["measured"], "uses_position_ids": uses}))


def _rows(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "]"
    return json.dumps(value)


def main() -> None:
    name, folder, text, *attention = sys.argv[1:]
    given = json.loads(Path(text).read_text() if text.endswith(".json") else text)
    case(name, given, Path(folder), *attention)


if __name__ == "__main__":
    main()
