"""Runs that learn from rewards: known optima, exact resumption, adapters, meshes, refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from objective_runs import model, tok

from flaxen.core.errors import CheckpointError, InputError, RewardError
from flaxen.core.tree import paths
from flaxen.generate.loop import programs
from flaxen.train import Result, train
from flaxen.train.checkpoint import Checkpoints

D = 7
PROMPTS = [4, 5], [6], [5, 5, 4]
PROGRAMS: list[int] = []
SETTINGS: dict[str, Any] = {
    "objective": "grpo",
    "seq_len": 16,
    "batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 3,
    "learning_rate": 0.02,
    "schedule": "constant",
    "progress": False,
}
REUSED = {"num_iterations": 2, "beta": 0.1, "save_every": 2, "steps": 8, "epsilon": 0.05}


def first_is_d(completion_ids, **_):
    return [float(ids[0] == D) for ids in completion_ids]


def short(completions):
    return [-len(text.split()) for text in completions]


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Of three prompts, the last of an epoch is alone in its step."""
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    return write(path, {"prompt": "a b"}, {"prompt": "c"}, {"prompt": "b b a"})


def run(data: Path, output: Path, reward: Any = first_is_d, base: Any = None, **more: Any):
    return train(base or model(), tok(), data, output=output, reward=reward, **SETTINGS | more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(result: Result) -> list[dict[str, float]]:
    """Rows of the log without times and memory."""
    rows = [row for row in result.rows if "loss" in row]
    return [
        {k: x for k, x in row.items() if "second" not in k and k != "memory_bytes"} for row in rows
    ]


def weights(result: Result) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in paths(result.model.module).items()}


def probability(model: Any, prompt: list[int], token: int) -> float:
    ids = np.array([[*prompt, 0, 0, 0][:4]])
    logits = np.asarray(model(ids).logits[0, len(prompt) - 1], np.float64)
    odds = np.exp(logits - logits.max())
    return odds[token] / odds.sum()


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("learned")
    more = {"steps": 50, "eval_data": data, "completions_every": 10}
    more |= {"on_step": lambda _: PROGRAMS.append(programs())}
    return run(data, output, [first_is_d, short], reward_weights=[1.0, 0.0], **more)


def test_a_policy_ends_at_what_is_rewarded(learned):
    """Only a first token is worth anything, so that at the optimum it is all there is."""
    rows = steps(learned)
    assert rows[0]["reward"] < 0.3
    assert all(row["reward"] == 1 and row["frac_reward_zero_std"] == 1 for row in rows[-3:])
    assert all(probability(learned.model, prompt, D) > 0.97 for prompt in PROMPTS)
    before, after = (row["eval_reward"] for row in learned.rows if "eval_reward" in row)
    assert before < after == 1


def test_what_a_step_tells(learned):
    """The mean length is also told by the function that rewards short ones."""
    row = steps(learned)[0]
    assert row["rewards/first_is_d/mean"] == row["reward"]
    assert row["completions/min_length"] >= 1
    assert row["completions/max_length"] <= 3
    assert row["tokens"] == 16 * row["completions/mean_length"]
    assert row["clip_ratio/region_mean"] == 0
    assert 0 < row["entropy"] < np.log(24)
    assert "kl" not in row


def test_samples_are_written_as_often_as_asked(learned):
    found = lines(learned.output / "completions.jsonl")
    assert sorted({row["step"] for row in found}) == [1, 11, 21, 31, 41]
    first = [row for row in found if row["step"] == 1]
    assert len(first) == 16
    for row in first:
        d = row["completion"].split()[:1] == ["d"]
        assert row["reward"] == row["rewards"]["first_is_d"] == d
        assert row["rewards"]["short"] == -len(row["completion"].split())
        assert row["prompt"] in ("a b", "c", "b b a")
    np.testing.assert_allclose(sum(row["advantage"] for row in first), 0, atol=1e-9)


@pytest.mark.exhaustive
def test_a_penalty_stops_where_the_reward_is_outweighed(tmp_path):
    """k3 of the policy's own samples pulls along the gradient of KL(reference || policy), so that
    without scaling p (b - c (r - mean r)) = b ref at the optimum, c = 1 - 1 / G as a completion is
    in its own baseline. Of one token that is worth 1, c p^2 + (b - c) p = b ref.
    """
    before, beta, size = model(), 0.4, 16
    path = write(tmp_path / "a.jsonl", {"prompt": "a b"})
    more = {"max_completion_length": 1, "num_generations": size, "scale_rewards": "none"}
    more |= {"beta": beta, "schedule": "linear", "steps": 150, "completions_every": 0}
    result = run(path, tmp_path / "out", base=before, **more)
    c, ref = 1 - 1 / size, probability(before, [4, 5], D)
    want = (c - beta + np.sqrt((c - beta) ** 2 + 4 * c * beta * ref)) / (2 * c)
    assert abs(probability(result.model, [4, 5], D) - want) < 0.03
    assert 0.5 < want < 0.8
    assert not (result.output / "completions.jsonl").read_text()


@pytest.fixture(scope="module")
def reused(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("reused"), **REUSED)


def test_a_rollout_is_learned_from_several_times(reused):
    """First the ratios are 1 and the policy is its reference; then neither is."""
    rows = steps(reused)
    assert [row["reward"] for row in rows[::2]] == [row["reward"] for row in rows[1::2]]
    assert rows[0]["kl"] == 0
    assert [row["clip_ratio/region_mean"] for row in rows[::2]] == [0] * 4
    assert sum(row["clip_ratio/region_mean"] for row in rows[1::2]) > 0
    assert rows[1]["kl"] > 0
    assert rows[-1]["epoch"] == 2


def test_a_run_whose_reward_failed_goes_on_bit_by_bit(reused, data, tmp_path):
    """The function fails at the third rollout, before step 5."""
    calls = []

    def first_is_d(completion_ids):
        calls.append(len(completion_ids))
        return [float(ids[0] == D) if len(calls) < 3 else np.nan for ids in completion_ids]

    more = REUSED | {"save_every": 0}
    said = "reward function 'first_is_d', asked for step 5, gave nan for completion 0"
    with pytest.raises(RewardError, match=said):
        run(data, tmp_path, first_is_d, **more)
    assert calls == [16, 8, 16]
    assert Checkpoints(tmp_path / "checkpoints", {}).steps() == [4]
    result = run(data, tmp_path, **REUSED, resume=True)
    assert steps(result) == steps(reused)
    want = lines(reused.output / "completions.jsonl")
    assert lines(tmp_path / "completions.jsonl") == want
    for path, array in weights(reused).items():
        np.testing.assert_array_equal(weights(result)[path], array, err_msg=path)


def test_a_stop_waits_for_the_end_of_a_rollout(data, tmp_path):
    stop = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 1 else None
    result = run(data, tmp_path, on_step=stop, **REUSED | {"num_iterations": 3, "save_every": 0})
    assert (result.finished, result.step) == (False, 3)
    with pytest.raises(CheckpointError, match="num_iterations: found 3, expected 2"):
        run(data, tmp_path, **REUSED, resume=True)


def test_adapters_learn_and_their_absence_is_the_reference(data, tmp_path):
    """Any of the last ten tokens will do. What is sampled at the end is sampled with adapters, so
    that its rewards are those of the merged model.
    """
    late = lambda completion_ids: [float(ids[0] > 13) for ids in completion_ids]
    result = run(data, tmp_path, late, lora_rank=4, steps=24, beta=1e-3)
    rows = steps(result)
    assert rows[0]["kl"] == 0 < rows[-1]["kl"]
    before, after = (
        np.mean([sum(probability(m, p, t) for t in range(14, 24)) for p in PROMPTS])
        for m in (model(), result.model)
    )
    assert after > before + 0.2
    assert abs(np.mean([row["reward"] for row in rows[-6:]]) - after) < 0.1
    assert (result.output / "adapter" / "adapter_model.safetensors").exists()


def test_a_mesh_samples_and_learns_the_same(reused, data, tmp_path):
    result = run(data, tmp_path, base=model(mesh="fsdp=2"), **REUSED)
    assert lines(tmp_path / "completions.jsonl") == lines(reused.output / "completions.jsonl")
    for path, array in weights(reused).items():
        np.testing.assert_allclose(weights(result)[path], array, atol=1e-4, err_msg=path)


def test_steps_share_their_programs(learned):
    """Of sampling, held-out prompts too; rows of the log come one step late."""
    assert len(PROGRAMS) == 50
    assert len({*PROGRAMS}) == 1


def test_a_reward_that_nobody_asks_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="'dpo' asks no reward function"):
        given = {"objective": "dpo", "output": tmp_path / "run", "progress": False}
        train(model(), tok(), data, reward=first_is_d, **given)
    assert not (tmp_path / "run").exists()
