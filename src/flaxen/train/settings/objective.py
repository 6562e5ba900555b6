"""What is minimised: causal, dpo, grpo, ... (docs/objectives.md)."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import names_in, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """`objective` is one of `train.objectives.OBJECTIVES`; the others are for some of them, as
    docs/objectives.md says, and refused for the rest.
    """

    objective: str = setting(
        "causal", "What is minimised.", choices=names_in("flaxen.train.objectives:OBJECTIVES")
    )
    beta: float | None = setting(
        None, "How near the reference is kept; default: 0.1, of grpo 0.", least=0
    )
    loss_type: str | None = setting(
        None,
        "Of dpo: sigmoid (default), ipo, hinge, exo_pair, nca_pair, robust, sppo_hard, apo_zero, "
        "apo_down, sigmoid_norm; of grpo: dapo (default), grpo, bnpo, dr_grpo.",
    )
    dpo_label_smoothing: float = setting(
        0.0, "How many preferences are the other way round.", least=0, most=0.499
    )
    simpo_gamma: float = setting(0.5, "The margin of simpo.", least=0)
    cpo_alpha: float = setting(1.0, "What the likelihood of the chosen weighs in cpo.", least=0)
    desirable_weight: float = setting(1.0, "What a good answer weighs in kto.", least=0)
    undesirable_weight: float = setting(1.0, "What a bad answer weighs in kto.", least=0)
    center_rewards_coefficient: float = setting(
        0.0, "Pulls the rewards of a pair together to zero.", least=0
    )
    distillation_beta: float = setting(
        0.0, "0: forward KL, 1: reverse KL, between: their generalised JSD.", least=0, most=1
    )
    distillation_temperature: float = setting(1.0, "Of teacher and student.", above=0)
    distillation_alpha: float = setting(
        0.0, "What the data itself weighs; the teacher has the rest.", least=0, most=1
    )
    embedding_temperature: float = setting(0.05, "Divides the similarities of texts.", above=0)
    embedding_symmetric: bool = setting(False, "Texts find their queries too.")
    mlm_probability: float = setting(0.15, "How many tokens masked hides.", above=0, most=1)
