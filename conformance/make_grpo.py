"""What TRL's own GRPO loss makes of given log-probabilities: tests/data/grpo.json.

Run where torch and trl are installed: python conformance/make_grpo.py
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

TARGET = Path(__file__).parent.parent / "tests" / "data" / "grpo.json"
LENGTHS = [[5, 2, 3], [1, 0, 4]]
"""Tokens that are learned in each row of two micro-batches; 0 is of a completion that was cut."""
SHAPE = MICRO, B, T = 2, 3, 5
MOST, EPSILON, EPSILON_HIGH = 7, 0.2, 0.28
DRAW = np.random.default_rng(0)
MASK = np.arange(T) < np.array(LENGTHS)[..., None]
LOGPS = -DRAW.uniform(0.1, 3, SHAPE)
OLD, REF = (LOGPS + DRAW.normal(0, 0.3, SHAPE) for _ in range(2))
ADVANTAGES = DRAW.normal(0, 1, (MICRO, B))


def trainer(logps: torch.Tensor, kind: str, level: str, beta: float) -> Any:
    same = lambda x, **_: x
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, -logps, None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=same, reduce=same, num_processes=1),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=MICRO),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=MICRO,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON_HIGH,
        importance_sampling_level=level,
        loss_type=kind,
        max_completion_length=MOST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )


def loss(kind: str, level: str, beta: float) -> dict[str, Any]:
    """The loss of both micro-batches together, its gradient, and what is told of each."""
    logps = torch.tensor(LOGPS, requires_grad=True)
    total, told = torch.zeros((), dtype=torch.float64), defaultdict(list)
    for i in range(MICRO):
        self = trainer(logps[i], kind, level, beta)
        mask = torch.tensor(MASK[i]).long()
        nothing = torch.zeros((B, 0), dtype=torch.long)
        inputs = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": torch.tensor(ADVANTAGES[i]),
            "old_per_token_logps": torch.tensor(OLD[i]),
            "ref_per_token_logps": torch.tensor(REF[i]),
            "num_items_in_batch": torch.tensor(MASK.sum()),
        }
        total = total + GRPOTrainer._compute_loss(self, None, inputs)
        for key, values in self._metrics["train"].items():
            told[key] += values
    (slope,) = torch.autograd.grad(total, logps)
    return {"loss": total.item(), "gradient": slope.tolist(), "told": dict(told)}


def main() -> None:
    cases = itertools.product(
        ("grpo", "bnpo", "dr_grpo", "dapo"), ("token", "sequence"), (0.0, 0.04)
    )
    found = {
        "max_completion_length": MOST,
        "epsilon": EPSILON,
        "epsilon_high": EPSILON_HIGH,
        "lengths": LENGTHS,
        "logps": LOGPS.tolist(),
        "old": OLD.tolist(),
        "ref": REF.tolist(),
        "advantages": ADVANTAGES.tolist(),
        "cases": {f"{k}/{level}/{beta}": loss(k, level, beta) for k, level, beta in cases},
    }
    TARGET.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
