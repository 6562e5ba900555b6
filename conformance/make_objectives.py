"""What TRL's own loss functions make of given log-probabilities: tests/data/objectives.json.

Run where torch and trl are installed: python conformance/make_objectives.py
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import golden

TARGET = Path(__file__).parent.parent / "tests" / "data" / "objectives.json"
BETA, EPS, B, T = 0.3, 0.1, 3, 6
TYPES = [
    "sigmoid",
    "ipo",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
]
DRAW = np.random.default_rng(0)
LENGTHS = [2, 4, 5, 5, 3, 1]
"""Tokens of the answers: three chosen ones, three rejected ones."""
MASK = torch.tensor([[0] + [1] * n + [0] * (T - 1 - n) for n in LENGTHS])


def logps() -> torch.Tensor:
    """Of each token that a row predicts; zeros where none is of an answer."""
    return torch.tensor(-DRAW.uniform(0.1, 3, (2 * B, T - 1))) * MASK[:, 1:]


def model(*per_call: torch.Tensor) -> Any:
    """Gives these log-probabilities, call by call."""
    calls = iter(per_call)

    def call(**_: Any) -> Any:
        found = next(calls)
        told = dict.fromkeys(("entropy", "mean_logits", "aux_loss"), found)
        return SimpleNamespace(log_probs=found, is_top1=found > 0, **told)

    call.training = True
    return call


def trainer(**more: Any) -> Any:
    gather = SimpleNamespace(
        gather_for_metrics=lambda x: x,
        gather=lambda x: x,
        device="cpu",
        unwrap_model=lambda x: x,
    )
    return SimpleNamespace(
        accelerator=gather,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        beta=BETA,
        label_smoothing=EPS,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )


def dpo(kind: str, policy: torch.Tensor, before: torch.Tensor) -> float:
    first = model(policy)
    first.gradient_checkpointing_disable = None
    self = trainer(loss_types=[kind], ref_model=model(before), model=first)
    ids = torch.ones_like(MASK)
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": MASK}
    return DPOTrainer._compute_loss(self, first, inputs, False).item()


def kto(policy: Any, before: Any, drift: Any, ref_drift: Any, good: list[int]) -> Any:
    first, ref = model(drift, policy), model(ref_drift, before)
    self = trainer(
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        ref_model=ref,
        model=first,
    )
    self._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(self, model, batch)
    ids = torch.ones_like(MASK)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": MASK,
        "KL_input_ids": ids,
        "KL_attention_mask": ids,
        "KL_completion_mask": MASK,
        "label": torch.tensor(good),
    }
    loss = KTOTrainer._compute_loss(self, first, inputs, False).item()
    return {"loss": loss, "kl": self._metrics["train"]["kl"][0]}


def classified() -> dict[str, Any]:
    """Scores and loss of the golden llama with a head of three labels, its rows padded on either
    side.
    """
    case = golden.case("llama")
    about = {k: v for k, v in case.config.items() if k not in ("model_type", "architectures")}
    config = LlamaConfig(**about | {"num_labels": 3, "pad_token_id": 0})
    head = (DRAW.standard_normal((3, config.hidden_size)) / 8).astype(np.float32)
    weights = {k: torch.tensor(v) for k, v in case.weights.items() if not k.startswith("lm_head")}
    model = LlamaForSequenceClassification(config).eval()
    model.load_state_dict(weights | {"score.weight": torch.tensor(head)})
    ids = DRAW.integers(1, 100, (3, 6))
    ids[0, 4:], ids[1, :2] = 0, 0
    mask, labels = torch.tensor(ids != 0).long(), torch.tensor([2, 0, 1])
    with torch.no_grad():
        out = model(torch.tensor(ids), attention_mask=mask, labels=labels)
    return {
        "head": head.tolist(),
        "ids": ids.tolist(),
        "labels": labels.tolist(),
        "logits": out.logits.tolist(),
        "loss": out.loss.item(),
    }


def main() -> None:
    import trl.trainer.dpo_trainer as dpo_module
    import trl.trainer.kto_trainer as kto_module

    for module in (dpo_module, kto_module):
        module.disable_gradient_checkpointing = lambda *_: nullcontext()
        module.is_peft_model = lambda _: False
    policy, before, drift = logps(), logps(), logps()
    ref_drift = drift - 0.1 * MASK[:, 1:]
    chosen, rejected = policy.sum(1).chunk(2)
    lengths = torch.tensor(LENGTHS)
    mean_chosen, mean_rejected = (policy.sum(1) / lengths).chunk(2)
    cpo = trainer(alpha=0.0, loss_type="sigmoid")
    simpo = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=0.5)
    student, teacher = (torch.tensor(DRAW.normal(size=(4, 7)) * 2) for _ in range(2))
    good = [1, 0, 0, 1, 1, 0]
    found = {
        "beta": BETA,
        "eps": EPS,
        "lengths": LENGTHS,
        "policy": policy.sum(1).tolist(),
        "reference": before.sum(1).tolist(),
        "drift": drift.sum(1).tolist(),
        "ref_drift": ref_drift.sum(1).tolist(),
        "good": good,
        "dpo": {kind: dpo(kind, policy, before) for kind in TYPES},
        "kto": kto(policy, before, drift, ref_drift, good),
        "cpo": CPOTrainer.cpo_loss(cpo, chosen, rejected)[0].tolist(),
        "simpo": CPOTrainer.cpo_loss(simpo, mean_chosen, mean_rejected)[0].tolist(),
        "orpo": (-ORPOTrainer.odds_ratio_loss(trainer(), mean_chosen, mean_rejected)[0]).tolist(),
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "jsd": {
            str(beta): GKDTrainer.generalized_jsd_loss(
                student, teacher, beta=beta, temperature=1.7, reduction="none"
            )
            .sum(-1)
            .tolist()
            for beta in (0.0, 0.3, 1.0)
        },
    }
    found["classifier"] = classified()
    assert all(map(math.isfinite, found["dpo"].values()))
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
