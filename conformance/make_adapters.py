"""Write golden cases of adapters: folders of PEFT on golden models, and what torch computes with
them. Run it in the torch environment, in which PEFT is installed too:

    PYTHONPATH=tests .venv-torch/bin/python conformance/make_adapters.py [NAME ...]

tests/data/adapters/NAME.json holds the base's name, adapter_config.json as PEFT writes it, and the
names and shapes of its tensors, whose values are made again from their names as those of the base
are. NAME.npz holds logits, of a DoRA also gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import golden
import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_lora": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": LLAMA}),
    "llama_patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"k_proj": 2, r".*layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 16},
        },
    ),
    "llama_layers": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["v_proj", "down_proj"],
            "layers_to_transform": [1],
            "modules_to_save": ["lm_head", "embed_tokens"],
        },
    ),
    "llama_dora": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": LLAMA, "use_dora": True}),
    "gpt2_lora": (
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    "gpt2_dora": (
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "use_dora": True},
    ),
    "phi3_lora": ("phi3", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "phi3_dora": (
        "phi3",
        {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    ),
    "neox_lora": ("gpt_neox", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "mixtral_lora": (
        "mixtral",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    ),
}


def build(name: str, out: Path) -> None:
    base, settings = CASES[name]
    with tempfile.TemporaryDirectory() as place:
        folder = golden.write_folder(golden.case(base), Path(place) / "base")
        load = lambda: transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        fresh = peft.get_peft_model(load(), config)
        fresh.save_pretrained(Path(place) / "adapter")
        file = Path(place) / "adapter" / "adapter_model.safetensors"
        old = load_file(file)
        rows = [[key, list(x.shape), *numbers(key, x)] for key, x in sorted(old.items())]
        save_file(golden.adapter_tensors(rows), file, metadata={"format": "pt"})
        model = peft.PeftModel.from_pretrained(load(), Path(place) / "adapter", is_trainable=True)
        ids = torch.tensor(golden.case(base).arrays["full_input_ids"]).long()
        logits = model(ids).logits
        arrays = {"logits": logits.detach().numpy()}
        if "use_dora" in settings:
            (logits**2).mean().backward()
            grads = {
                PREFIX + k.replace(".default", "").removeprefix(PREFIX): p.grad
                for k, p in model.named_parameters()
                if p.requires_grad
            }
            arrays |= {
                f"grads/{k.replace('vector.weight', 'vector')}": g.numpy()
                for k, g in grads.items()
                if ".1." in k and g is not None
            }
        merged = model.merge_and_unload()
        same = np.abs(arrays["logits"] - merged(ids).logits.detach().numpy()).max()
        about = json.loads((Path(place) / "adapter" / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = None
    about["target_modules"] = sorted(about["target_modules"])
    written = {"base": base, "peft": peft.__version__, "config": about, "tensors": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n")
    np.savez_compressed(out / f"{name}.npz", **arrays)
    print(name, len(rows), "tensors", float(same))


def numbers(key: str, x: np.ndarray) -> tuple[float, float]:
    """Around what the numbers of a tensor lie, and how far they reach."""
    return (float(x.mean()), 0.2) if "magnitude" in key else (0.0, 0.3)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in sys.argv[1:] or CASES:
        build(each, Path(golden.DATA) / "adapters")
