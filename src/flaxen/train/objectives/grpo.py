"""Group relative policy optimisation: a model's own completions, judged by functions of the user.

Sources: GRPO, https://arxiv.org/abs/2402.03300; the ratio of whole completions is that of GSPO,
https://arxiv.org/abs/2507.18071; the estimator of the KL divergence is k3 of
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import ConfigError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import whole_context
from flaxen.models.skeleton import only_generating
from flaxen.train.data.prompts import Asked, Prompts, asked
from flaxen.train.objectives.advantages import SCALES, advantages, combined, moments
from flaxen.train.objectives.objective import Batch, Metrics, Objective, Prepared, Source
from flaxen.train.objectives.rewards import Rewards
from flaxen.train.objectives.rollout import Rollout, rows, sampled, seed_of
from flaxen.train.settings.policy import PolicySettings


class Grpo(Objective):
    """`loss_type` is one of `advantages.SCALES`. A step has batch_size * accumulation completions,
    `num_generations` of each prompt, which `num_iterations` steps learn from.
    """

    kinds: ClassVar = ("prompt", "conversation")
    online: ClassVar[bool] = True
    reads: ClassVar = (
        *("beta", "loss_type", "reference", "reward"),
        *PolicySettings.__dataclass_fields__,
    )
    needs: ClassVar = ("reward",)
    defaults: ClassVar = {"beta": 0.0, "loss_type": "dapo"}

    def __init__(self, config: Any, tok: Any = None, reward: Any = None):
        super().__init__(config, tok, reward)
        _check(self.config)
        self.scales = SCALES[self.config.loss_type]
        self.compares, self.steps_per_batch = self.config.beta > 0, config.num_iterations
        self.asked: list[Asked] = []
        """The prompts of all sources, which name them by their places."""

    def check(self, module: Any) -> None:
        only_generating(module, "be trained on its own completions")

    def begin(self, model: Any, reference: Any) -> None:
        self.rewards = Rewards(self.reward, self.config.reward_weights)

    def source(self, tok: Any, records: Any, accumulation: int) -> Prompts:
        prompts = self.config.batch_size * accumulation // self.config.num_generations
        return self._prompts(tok, records, prompts)

    def held_out(self, tok: Any, records: Any) -> Prompts:
        return self._prompts(tok, records, self.config.batch_size)

    def _prompts(self, tok: Any, records: Any, size: int) -> Prompts:
        new = asked(tok, records, self.config.seq_len - self.config.max_completion_length)
        start = len(self.asked)
        self.asked += new
        return Prompts(new, start, size, self.config.seed)

    def prepared(self, batch: dict[str, np.ndarray], model: Any, step: int) -> Prepared:
        config, size = self.config, self.config.num_generations
        rollout, count = self._rollout(batch, model, size, seed_of(config.seed, step))
        real = rollout.first(count)
        table = self.rewards(real, f"step {step + 1}")
        rewards = combined(table, self.rewards.weights).reshape(-1, size)
        better = advantages(rewards, config.scale_rewards)
        told = self._told(table, real)
        told["frac_reward_zero_std"] = float(np.isclose(moments(rewards)[1], 0).mean())
        batch = self._batch(rollout, better.reshape(-1))
        every = config.completions_every * config.num_iterations
        shown = every > 0 and step % every == 0
        samples = self._samples(real, table, better.reshape(-1)) if shown else []
        return Prepared(batch, told, samples)

    def measured(self, model: Any, source: Source) -> dict[str, float]:
        """Means over one sampled completion of each prompt, of the same seeds each time."""
        tables, parts = [], []
        for i in range(source.per_epoch):
            seed = seed_of(self.config.seed, i, 1)
            rollout, count = self._rollout(source.batch_at(i), model, 1, seed)
            parts.append(rollout.first(count))
            tables.append(self.rewards(parts[-1], "held-out prompts"))
        found = Rollout(
            [one for part in parts for one in part.asked],
            [ids for part in parts for ids in part.ids],
            [text for part in parts for text in part.texts],
            np.concatenate([part.truncated for part in parts]),
        )
        return self._told(np.concatenate(tables), found)

    def _rollout(
        self, batch: dict[str, np.ndarray], model: Any, times: int, seed: int
    ) -> tuple[Rollout, int]:
        """Completions of a batch's prompts, and how many of its rows are real ones."""
        places = batch["prompt"]
        # What fills up an epoch's last batch stands for the first prompt, and is not looked at.
        prompts = [self.asked[max(place, 0)] for place in places for _ in range(times)]
        rollout = sampled(model, self.tok, prompts, self.config, seed)
        return rollout, int((places >= 0).sum()) * times

    def _batch(self, rollout: Rollout, better: np.ndarray) -> dict[str, np.ndarray]:
        """Rows in micro-batches, with the advantage of each and what its tokens count."""
        config, real = self.config, np.arange(len(rollout.ids)) < len(better)
        learned = real & ~(rollout.truncated & config.mask_truncated_completions)
        shape = config.accumulation, config.batch_size
        batch = rows(rollout, learned, config.seq_len)
        batch = {key: x.reshape(*shape, -1) for key, x in batch.items()}
        lengths = (batch["targets"] != IGNORED).sum(-1)
        scale = self.scales(lengths, real.reshape(shape), config.max_completion_length)
        every = np.zeros(len(real))
        every[real] = better
        return batch | {
            "advantages": every.reshape(shape).astype(np.float32),
            "scale": scale.astype(np.float32),
        }

    def _told(self, table: np.ndarray, rollout: Rollout) -> dict[str, float]:
        """Means and deviations of rewards, and of lengths; without what has no number."""
        columns = dict(zip(self.rewards.functions, table.T.astype(np.float64), strict=True))
        all_of = lambda x: tuple(float(y[0]) for y in moments(x))
        mean, deviation = all_of(combined(table, self.rewards.weights))
        told = {"reward": mean, "reward_std": deviation}
        for name, column in columns.items():
            told[f"rewards/{name}/mean"], told[f"rewards/{name}/std"] = all_of(column)
        lengths = np.array([len(ids) for ids in rollout.ids], np.float64)
        told |= {
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": rollout.truncated.mean(),
        }
        return {key: float(value) for key, value in told.items() if np.isfinite(value)}

    def _samples(
        self, rollout: Rollout, table: np.ndarray, better: np.ndarray
    ) -> list[dict[str, Any]]:
        total = combined(table, self.rewards.weights)
        none = lambda x: None if np.isnan(x) else float(x)
        return [
            {
                "prompt": one.prompt,
                "completion": completion,
                "rewards": dict(zip(self.rewards.functions, map(none, given), strict=True)),
                "reward": none(reward),
                "advantage": float(advantage),
            }
            for one, completion, given, reward, advantage in zip(
                rollout.asked, rollout.completions, table, total, better, strict=True
            )
        ]

    def weight(self, batch: Batch) -> jax.Array:
        return (batch["targets"] != IGNORED).sum()

    def observed(self, model: Any, reference: Any, batch: Batch, runtime: Runtime) -> Batch:
        found: Batch = {}
        # With one step for each rollout, the old policy is the one that learns.
        if self.config.num_iterations > 1:
            found["old_logps"] = self._logps(model, batch, runtime)[0]
        if self.compares:
            found["ref_logps"] = self._logps(reference, batch, runtime)[0]
        return found

    def loss(
        self, model: Any, reference: Any, batch: Batch, runtime: Runtime
    ) -> tuple[jax.Array, Metrics]:
        key, real = batch.get("dropout_keys"), batch["targets"] != IGNORED
        logps, entropy = self._logps(model, batch, runtime, key, entropy=True)
        old = batch.get("old_logps", jax.lax.stop_gradient(logps))
        losses, told = surrogate(logps, old, batch["advantages"], real, self.config)
        if self.compares:
            told["kl"] = k3(logps, batch["ref_logps"])
            losses += self.config.beta * told["kl"]
        told["entropy"] = entropy
        total = jnp.sum(jnp.where(real, losses, 0) * batch["scale"][:, None])
        return total, {key: jnp.sum(jnp.where(real, x, 0)) for key, x in told.items()}

    def _logps(
        self, model: Any, batch: Batch, runtime: Runtime, key: Any = None, *, entropy: bool = False
    ) -> tuple[jax.Array, Any]:
        """log p of each sampled token under the tempered policy, (rows, T)."""
        ids = batch["ids"]
        ctx = whole_context(model, ids.shape, runtime, dropout_key=key)
        temperature = self.config.temperature
        return model.logps(ids, batch["targets"], ctx, temperature=temperature, entropy=entropy)


def surrogate(
    logps: jax.Array, old: jax.Array, better: jax.Array, real: jax.Array, config: Any
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate of each token, negative, and where it is clipped, (rows, T).

    logps, old (rows, T): of the policy that learns and of the one that sampled; better (rows,):
    advantages; real (rows, T): which tokens count.
    """
    log_ratio = jnp.where(real, logps - old, 0)
    if config.importance_sampling_level == "sequence":
        lengths = jnp.maximum(real.sum(-1, keepdims=True), 1)
        log_ratio = jnp.broadcast_to(log_ratio.sum(-1, keepdims=True) / lengths, real.shape)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    low, high, better = 1 - config.epsilon, 1 + high, better[:, None]
    ratio = jnp.exp(log_ratio)
    losses = -jnp.minimum(ratio * better, jnp.clip(ratio, low, high) * better)
    below, above = (ratio < low) & (better < 0), (ratio > high) & (better > 0)
    clipped = {"low": below, "high": above, "region": below | above}
    return losses, {f"clip_ratio/{k}_mean": x.astype(jnp.float32) for k, x in clipped.items()}


def k3(logps: jax.Array, ref: jax.Array) -> jax.Array:
    """An estimate of KL(policy || reference) from one sample of the policy, never negative."""
    return jnp.exp(ref - logps) - (ref - logps) - 1


def _check(config: Any) -> None:
    """
    Raises:
        ConfigError: numbers that do not go together.
    """
    rows, size = config.batch_size * config.accumulation, config.num_generations
    if rows % size:
        raise ConfigError(
            f"A step has batch_size * accumulation = {config.batch_size} * {config.accumulation} "
            f"= {rows} completions, which num_generations={size} does not divide into whole "
            f"groups. {_mended(config.batch_size, config.accumulation, size)}"
        )
    if config.max_completion_length >= config.seq_len:
        raise ConfigError(
            f"max_completion_length is {config.max_completion_length} and seq_len "
            f"{config.seq_len}, which prompt and completion share; lower it, or raise seq_len."
        )
    if config.save_every % config.num_iterations:
        raise ConfigError(
            f"save_every is {config.save_every} and num_iterations {config.num_iterations}; "
            "expected a multiple, as checkpoints stand between rollouts."
        )


def _mended(batch_size: int, accumulation: int, size: int) -> str:
    """The nearest numbers that make whole groups."""
    up = lambda number, step: -(-number // step) * step
    rows = batch_size * accumulation
    lower = next((n for n in range(min(size, rows), 1, -1) if rows % n == 0), None)
    return (
        f"Raise batch_size to {up(batch_size, size // math.gcd(size, accumulation))} or "
        f"accumulation to {up(accumulation, size // math.gcd(size, batch_size))}"
        + (f", or lower num_generations to {lower}." if lower else ".")
    )
