"""What a policy samples, and how it learns from rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """For objectives with rewards, as docs/grpo.md says; names are TRL's."""

    num_generations: int = setting(8, "Completions of each prompt.", least=2)
    max_completion_length: int = setting(256, "Tokens of a completion at most.", least=1)
    temperature: float = setting(1.0, "Of sampling, and of the policy that is learned.", above=0)
    top_p: float = setting(1.0, "Sample among the likeliest only.", above=0, most=1)
    epsilon: float = setting(0.2, "Ratios below 1 - epsilon are clipped.", least=0)
    epsilon_high: float | None = setting(
        None, "Ratios above 1 + epsilon_high are clipped; default: epsilon.", least=0
    )
    num_iterations: int = setting(1, "Steps that learn from the same completions.", least=1)
    scale_rewards: str | bool = setting(
        "group",
        "Whose standard deviation divides advantages.",
        choices=("group", "batch", "none", True, False),
    )
    importance_sampling_level: str = setting(
        "token", "What has a ratio of its own.", choices=("token", "sequence")
    )
    mask_truncated_completions: bool = setting(
        False, "Learn nothing from completions without an end."
    )
    reward_weights: Sequence[float] | None = setting(
        None, "One for each reward function; default: 1."
    )
    completions_every: int = setting(
        1, "Rollouts between those in completions.jsonl; 0: none.", least=0, free=True
    )
