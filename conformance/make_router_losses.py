"""Write what torch computes of routers: logits, load-balancing loss, and the gradient of a model's
loss with it, for golden cases with experts. Run it in the torch environment:

    .venv-torch/bin/python conformance/make_router_losses.py tests/data/routers mixtral gpt_oss ...

Each file holds `router_logits` (layers, B * T, experts), 0 at padding, `aux_loss`, `loss`, and the
gradient's norms under `norm:` and the names of weights, all of the case's padded ids with its
labels, at a coefficient that makes the loss of routers count.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import golden, gradients

COEFFICIENT = 0.5


def routers(name: str, folder: Path) -> None:
    case = golden.case(name)
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    with tempfile.TemporaryDirectory() as place:
        golden.write_folder(case, place)
        config = transformers.AutoConfig.from_pretrained(place, **asked)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=torch.float32,
            attn_implementation=case.about["attention"],
            output_loading_info=True,
        )
    odd = {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}
    # Buffers may be missing: the model computes them.
    assert odd.isdisjoint(dict(model.named_parameters())) and not info["unexpected_keys"]
    model.eval()
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    x = {key: case.arrays[key] for key in names if key in case.arrays}
    t = {key: torch.tensor(value).long() for key, value in x.items()}
    uses = case.about["uses_position_ids"]
    given = {key: v for key, v in t.items() if uses or key != "position_ids"}
    with torch.no_grad():
        out = model(**given, use_cache=False)
    keep = x["attention_mask"].reshape(-1, 1)
    scores = np.stack(
        [s.reshape(-1, s.shape[-1]).float().numpy() * keep for s in out.router_logits]
    )
    arrays = {"router_logits": scores, "aux_loss": np.float32(out.aux_loss)}
    arrays["loss"], norms = gradients(model, x, uses)
    norms = {f"norm:{key}": np.float32(norm) for key, norm in norms.items()}
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **arrays, **norms)
    print(name, scores.shape, float(out.aux_loss), float(arrays["loss"]))


if __name__ == "__main__":
    for each in sys.argv[2:]:
        routers(each, Path(sys.argv[1]))
