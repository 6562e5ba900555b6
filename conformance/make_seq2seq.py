"""Write golden cases of encoder-decoders: tiny models of Transformers with weights made from their
names, and what torch computes with them. Run it in the torch environment:

    .venv-torch/bin/python conformance/make_seq2seq.py tests/data/golden [NAME ...]

`tests/data/golden/README.md` says what the files hold.
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
from make_golden import checkpoint, golden, numbers
from safetensors.numpy import save_file

T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "layer_norm_epsilon": 1e-3, "num_decoder_layers": 3}
BART = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 40, "pad_token_id": 1}
BART |= {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "forced_eos_token_id": None}
BART |= {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "t5_gated": {
        "model_type": "t5",
        **T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
    },
    "mt5": {"model_type": "mt5", **T5},
    "umt5": {"model_type": "umt5", **T5, "feed_forward_proj": "gated-silu"},
    "mbart": {"model_type": "mbart", **BART, "scale_embedding": True},
    "pegasus": {"model_type": "pegasus", **BART, "activation_function": "relu"},
    "marian": {"model_type": "marian", **BART, "scale_embedding": True},
}
OWN_HEAD = {"t5_gated"}
"""Its file holds a head that differs from the embeddings."""


def built(name: str, config: Any) -> tuple[Any, list[Any], dict[str, np.ndarray]]:
    """The model with its weights from the recipe, the rows that tell them, and they themselves."""
    auto = transformers.AutoModelForSeq2SeqLM
    fresh = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as place:
        like = checkpoint(fresh, Path(place))
        if name in OWN_HEAD:
            like["lm_head.weight"] = like["shared.weight"]
        rows = [
            [key, list(x.shape), "float32", *numbers(key, x, False)]
            for key, x in sorted(like.items())
        ]
        weights = {
            key: golden.weight(key, shape, base, scale, dtype)
            for key, shape, dtype, base, scale in rows
        }
        save_file(weights, Path(place) / "model.safetensors", metadata={"format": "pt"})
        model, info = auto.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[kind], (kind, info[kind])
    with tempfile.TemporaryDirectory() as place:
        back = checkpoint(model, Path(place))
    assert back.keys() == weights.keys(), back.keys() ^ weights.keys()
    assert all(np.array_equal(back[key], weights[key]) for key in back)
    return model.eval(), rows, weights


def inputs(vocab: int, pad: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(3, vocab, shape).astype(np.int32)
    mask = np.ones((3, 12), np.int32)
    mask[1, :4], mask[2, 9:] = 0, 0
    labels = draw(3, 7)
    labels[0, 5:] = -100
    return {
        "input_ids": np.where(mask == 1, draw(3, 12), pad).astype(np.int32),
        "attention_mask": mask,
        "decoder_input_ids": draw(3, 8),
        "long_input_ids": draw(1, 40),
        "long_decoder_input_ids": draw(1, 32),
        "labels": labels,
    }


def outputs(model: Any, x: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
    t = {key: torch.tensor(value).long() for key, value in x.items()}
    read = {"input_ids": t["input_ids"], "attention_mask": t["attention_mask"]}
    run = lambda **given: model(use_cache=False, **given)
    with torch.no_grad():
        out = run(**read, decoder_input_ids=t["decoder_input_ids"])
        long = run(
            input_ids=t["long_input_ids"], decoder_input_ids=t["long_decoder_input_ids"]
        ).logits
        said, margin = torch.full((3, 1), start), math.inf
        for _ in range(16):
            best = run(**read, decoder_input_ids=said).logits[:, -1].topk(2)
            margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
            said = torch.cat([said, best.indices[:, :1]], 1)
    run(**read, labels=t["labels"]).loss.backward()
    states = out.encoder_last_hidden_state.numpy() * x["attention_mask"][..., None]
    return {
        "logits": out.logits.numpy(),
        "encoder_last_hidden_state": states,
        "long_logits": long.numpy(),
        "loss": run(**read, labels=t["labels"]).loss.detach().numpy(),
        "gen_sequences": said.numpy().astype(np.int32),
        "gen_min_margin": np.float32(margin),
    }


def main(folder: str, names: list[str]) -> None:
    for name in names or CONFIGS:
        torch.manual_seed(0)
        kwargs = dict(CONFIGS[name])
        config = transformers.CONFIG_MAPPING[kwargs.pop("model_type")](**kwargs)
        model, rows, weights = built(name, config)
        x = inputs(config.vocab_size, config.pad_token_id)
        x |= outputs(model, x, config.decoder_start_token_id)
        architecture = type(model).__name__
        full = {"architectures": [architecture], **config.to_dict()}
        grads = {
            key: float(p.grad.norm())
            for key, p in model.named_parameters()
            if key in weights and p.grad is not None
        }
        about = {
            "case": name,
            "kind": "seq2seq",
            "model_type": config.model_type,
            "architecture": architecture,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "config": full | {"architectures": [architecture]},
            "config_kwargs": kwargs,
            "config_legacy": None,
            "arrays": {key: [str(array.dtype), list(array.shape)] for key, array in x.items()},
            "tensors": rows,
            "grad_norms": grads,
        }
        path = Path(folder) / name
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in about.items())
        path.with_suffix(".json").write_text(f"{{\n{lines}\n}}\n")
        np.savez_compressed(path.with_suffix(".npz"), **x)
        size = sum(path.with_suffix(end).stat().st_size for end in (".json", ".npz"))
        print(f"{name}: margin {x['gen_min_margin']:.3f}, {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
