"""Write the cases of encoders with all their heads: tiny models of Transformers with weights made
from their names, and what torch computes with them. Run it in the torch environment:

    .venv-torch/bin/python conformance/make_encoders.py tests/data/encoders

For each model type a JSON file (configs and the recipes of weights) and an npz of what went in and
came out; `tests/families/test_heads.py` reads them.
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
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import golden
from make_golden import checkpoint

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "vocab_size": 41,
    "layer_norm_eps": 1e-3,
}
DISTIL = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48, "vocab_size": 41}
MODERN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 41,
    "norm_eps": 1e-3,
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
ALL_BIASES = {f"{part}_bias": True for part in ("attention", "mlp", "norm", "classifier")}
SINGLE = {"num_labels": 5}
MULTI = {"num_labels": 3, "problem_type": "multi_label_classification"}

CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "bert": {
        "bare": ("BertModel", BERT),
        "relu_odd_heads": (
            "BertModel",
            {**BERT, "hidden_size": 36, "num_attention_heads": 3, "hidden_act": "relu"},
        ),
        "untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
        "pretraining": ("BertForPreTraining", BERT),
        "single": ("BertForSequenceClassification", {**BERT, **SINGLE}),
        "multi": ("BertForSequenceClassification", {**BERT, **MULTI}),
        "regression": ("BertForSequenceClassification", {**BERT, "num_labels": 1}),
        "regression_many": (
            "BertForSequenceClassification",
            {**BERT, "num_labels": 3, "problem_type": "regression"},
        ),
        "tokens": ("BertForTokenClassification", {**BERT, **SINGLE}),
        "span": ("BertForQuestionAnswering", BERT),
        "choices": ("BertForMultipleChoice", BERT),
    },
    "roberta": {
        "bare": ("RobertaModel", BERT),
        "single": ("RobertaForSequenceClassification", {**BERT, **SINGLE}),
        "tokens": ("RobertaForTokenClassification", {**BERT, **SINGLE}),
        "choices": ("RobertaForMultipleChoice", BERT),
        "masked_relu": ("RobertaForMaskedLM", {**BERT, "hidden_act": "relu", "pad_token_id": 3}),
        "untied": ("RobertaForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    },
    "xlm-roberta": {
        "masked": ("XLMRobertaForMaskedLM", {**BERT, "type_vocab_size": 1}),
        "span": ("XLMRobertaForQuestionAnswering", {**BERT, "type_vocab_size": 1}),
    },
    "mpnet": {
        "bare": ("MPNetModel", {**BERT, "num_hidden_layers": 2}),
        "masked": ("MPNetForMaskedLM", {**BERT, "max_position_embeddings": 300}),
        "single": ("MPNetForSequenceClassification", {**BERT, **SINGLE}),
        "wide_table": (
            "MPNetForTokenClassification",
            {**BERT, **SINGLE, "relative_attention_num_buckets": 40},
        ),
        "span": ("MPNetForQuestionAnswering", BERT),
        "choices": ("MPNetForMultipleChoice", BERT),
    },
    "distilbert": {
        "bare": ("DistilBertModel", {**DISTIL, "n_layers": 2}),
        "masked": ("DistilBertForMaskedLM", {**DISTIL, "activation": "relu"}),
        "untied": ("DistilBertForMaskedLM", {**DISTIL, "tie_word_embeddings": False}),
        "single": ("DistilBertForSequenceClassification", {**DISTIL, **SINGLE}),
        "tokens": ("DistilBertForTokenClassification", {**DISTIL, **SINGLE}),
        "span": ("DistilBertForQuestionAnswering", DISTIL),
        "choices": ("DistilBertForMultipleChoice", DISTIL),
    },
    "modernbert": {
        "bare": ("ModernBertModel", {**MODERN, "num_hidden_layers": 4}),
        "masked": ("ModernBertForMaskedLM", MODERN),
        "biases_untied": (
            "ModernBertForMaskedLM",
            {**MODERN, **ALL_BIASES, "tie_word_embeddings": False},
        ),
        "no_decoder_bias": (
            "ModernBertForMaskedLM",
            {
                **MODERN,
                "decoder_bias": False,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        "cls": ("ModernBertForSequenceClassification", {**MODERN, **SINGLE}),
        "mean": (
            "ModernBertForSequenceClassification",
            {**MODERN, **MULTI, "classifier_pooling": "mean"},
        ),
        "tokens": (
            "ModernBertForTokenClassification",
            {**MODERN, **SINGLE, "classifier_activation": "relu"},
        ),
        "span": ("ModernBertForQuestionAnswering", MODERN),
        "choices": ("ModernBertForMultipleChoice", MODERN),
        "choices_mean": ("ModernBertForMultipleChoice", {**MODERN, "classifier_pooling": "mean"}),
        "scaled_rope": (
            "ModernBertModel",
            {
                **MODERN,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        ),
    },
    "nomic_bert": {
        "bare": ("NomicBertModel", {**BERT, "num_hidden_layers": 2}),
        "wide_heads": ("NomicBertModel", {**BERT, "head_dim": 12}),
        "masked": ("NomicBertForMaskedLM", BERT),
        "single": ("NomicBertForSequenceClassification", {**BERT, **SINGLE}),
        "tokens": ("NomicBertForTokenClassification", {**BERT, **SINGLE, "hidden_act": "gelu"}),
    },
}
TYPED = ("bert", "roberta", "nomic_bert")
ROWS, LENGTH = 3, 14


def numbers(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if len(shape) < 2:
        return (1.0, 0.4) if "norm" in key.lower() and key.endswith("weight") else (0.0, 0.2)
    return 0.0, round(math.sqrt(12 / shape[1]), 4)


def built(architecture: str, config: Any) -> tuple[Any, list[Any]]:
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        like = checkpoint(kind(config), Path(place))
        rows = [
            [k, list(x.shape), "float32", *numbers(k, x.shape)] for k, x in sorted(like.items())
        ]
        weights = {k: golden.weight(k, *rest[:1], *rest[2:]) for k, *rest in rows}
        save_file(weights, Path(place) / "model.safetensors", metadata={"format": "pt"})
        model, info = kind.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval(), rows


def inputs(model_type: str, architecture: str, config: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = np.ones((ROWS, LENGTH), np.int32)
    mask[1, :4], mask[2, 10:] = 0, 0
    pad = 1 if model_type == "mpnet" else config.pad_token_id
    ids = np.where(mask == 1, rng.integers(4, config.vocab_size, mask.shape), pad)
    x = {"input_ids": ids.astype(np.int32), "attention_mask": mask}
    if model_type in TYPED and config.type_vocab_size > 1:
        x["token_type_ids"] = rng.integers(0, 2, mask.shape).astype(np.int32)
    labels = config.num_labels
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        x["labels"] = np.where(mask == 1, rng.integers(0, config.vocab_size, mask.shape), -100)
    if architecture.endswith("ForPreTraining"):
        x["next_sentence_label"] = np.array([0, 1, 1])
    if architecture.endswith("ForTokenClassification"):
        x["labels"] = np.where(mask == 1, rng.integers(0, labels, mask.shape), -100)
    if architecture.endswith("ForQuestionAnswering"):
        x["start_positions"], x["end_positions"] = np.array([2, 6, 0]), np.array([5, 9, 40])
    if architecture.endswith("ForSequenceClassification"):
        whole = labels > 1 and config.problem_type is None
        shape = (ROWS,) if whole or labels == 1 else (ROWS, labels)
        x["labels"] = rng.integers(0, labels, shape) if whole else rng.random(shape)
    if architecture.endswith("ForMultipleChoice"):
        x = {key: value[None] for key, value in x.items()} | {"labels": np.array([1])}
    return {k: v.astype(np.int32 if v.dtype.kind == "i" else np.float32) for k, v in x.items()}


def outputs(model: Any, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    given = {k: torch.tensor(v) for k, v in x.items()}
    given = {k: v if v.dtype == torch.float32 else v.long() for k, v in given.items()}
    out = model(**given)
    found = {k: v.detach().numpy() for k, v in out.items() if isinstance(v, torch.Tensor)}
    mask = x["attention_mask"]
    for key, value in found.items():
        if value.shape[:2] == mask.shape:
            found[key] = value * mask.reshape(*mask.shape, *[1] * (value.ndim - 2))
    return found


def gradients(model: Any, x: dict[str, np.ndarray]) -> dict[str, float]:
    given = {k: torch.tensor(v) for k, v in x.items()}
    given = {k: v if v.dtype == torch.float32 else v.long() for k, v in given.items()}
    out = model(**given)
    if out.get("loss") is None:
        return {}
    out.loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    with tempfile.TemporaryDirectory() as place:
        grads = checkpoint(model, Path(place))
    return {key: float(f"{np.linalg.norm(g):.6g}") for key, g in sorted(grads.items())}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for model_type, cases in CASES.items():
        about, arrays = {}, {}
        for name, (architecture, kwargs) in cases.items():
            config = transformers.CONFIG_MAPPING[model_type](**kwargs)
            model, rows = built(architecture, config)
            x = inputs(model_type, architecture, config)
            arrays |= {f"{name}/in/{k}": v for k, v in x.items()}
            arrays |= {f"{name}/out/{k}": v for k, v in outputs(model, x).items()}
            raw = {"model_type": model_type, "architectures": [architecture], **kwargs}
            learns = model_type == "bert" or name in ("masked", "single", "cls")
            norms = gradients(model, x) if learns else {}
            about[name] = {"config": raw, "tensors": rows, "grad_norms": norms}
            print(model_type, name, sorted(k for k in arrays if k.startswith(f"{name}/out")))
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in about.items())
        (folder / f"{model_type}.json").write_text("{\n" + lines + "\n}\n")
        np.savez_compressed(folder / f"{model_type}.npz", **arrays)


if __name__ == "__main__":
    main()
