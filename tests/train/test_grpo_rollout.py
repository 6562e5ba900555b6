"""Rollouts and rewards, without a run: what is asked, what functions are told, what is learned."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import pytest
from objective_runs import model, tok
from words import TEMPLATE, word_tokenizer

from flaxen.core.errors import InputError, RewardError
from flaxen.train import OBJECTIVES, TrainConfig
from flaxen.train.data.records import Record

EOS = 2
SETTINGS: dict[str, Any] = {
    "objective": "grpo",
    "seq_len": 16,
    "batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 3,
}


def nothing(prompts):
    return [0.0] * len(prompts)


class Once:
    """An objective between its model and its batches, without a run."""

    def __init__(self, reward: Any, *fields: dict[str, Any], tok: Any = None, **more: Any):
        tok = tok or globals()["tok"]()
        config = TrainConfig(output="unused", **SETTINGS | more)
        self.objective = OBJECTIVES["grpo"](config, tok, reward)
        self.objective.begin(model(), None)
        self.source = self.objective.source(
            tok, [Record(f"a.jsonl:{i}", one) for i, one in enumerate(fields, 1)], 1
        )

    def prepared(self, step: int = 0) -> Any:
        return self.objective.prepared(self.source.batch_at(step), model(), step)


def test_log_probabilities_are_those_of_the_tempered_policy():
    """Of each token after its prompt, the end of a row too, from the scores of a plain call."""
    once = Once(nothing, {"prompt": "a b"}, {"prompt": "c"}, temperature=0.7, num_iterations=2)
    batch = once.prepared().batch
    micro = {key: x[0] for key, x in batch.items()}
    observed = jax.jit(once.objective.observed, static_argnums=3)
    got = observed(model().module, None, micro, model().runtime)
    logits = np.asarray(model()(micro["ids"]).logits, np.float64) / 0.7
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    asked = {tuple(one.ids) for one in once.objective.asked}
    for row in range(16):
        (slots,) = np.nonzero(micro["targets"][row] != -100)
        start, stop = slots[0] + 1, slots[-1] + 2
        assert tuple(micro["ids"][row, :start].tolist()) in asked
        answer = micro["ids"][row, start:stop]
        np.testing.assert_array_equal(micro["targets"][row, slots], answer)
        assert len(answer) == 3 or answer[-1] == EOS
        want = logps[row, slots, answer]
        np.testing.assert_allclose(got["old_logps"][row, slots], want, atol=1e-5)


def test_nothing_is_learned_from_completions_without_an_end_if_so_asked():
    for masked in (False, True):
        once = Once(nothing, {"prompt": "a b"}, mask_truncated_completions=masked)
        batch = once.prepared().batch
        learned = (batch["targets"] != -100).sum(-1)
        ended = (batch["targets"] == EOS).any(-1)
        real = np.arange(16)[None] < 8  # one prompt alone
        assert (~ended & real).any()
        np.testing.assert_array_equal(learned > 0, real & (ended | (not masked)))


def test_a_function_is_told_prompts_completions_and_columns():
    seen: dict[str, Any] = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, **columns)
        return [None if a is None else 1 for a in answer]

    asked = {"prompt": "a", "completion": "x", "answer": 5, "level": "hard"}
    told = Once(reward, asked, {"prompt": "b"}).prepared().told
    assert sorted(zip(seen["prompts"], seen["answer"], seen["level"], strict=True), key=str) == (
        [("a", 5, "hard")] * 8 + [("b", None, None)] * 8
    )
    assert seen.keys() == {"prompts", "completions", "answer", "level", "completion_ids"}
    decoded = [tok().decode(ids, skip_special_tokens=True) for ids in seen["completion_ids"]]
    assert decoded == seen["completions"]
    assert told["reward"] == 1
    assert told["frac_reward_zero_std"] == 1


def test_conversations_are_asked_and_answered_in_messages():
    chat = word_tokenizer(24)
    chat.chat_template = TEMPLATE
    seen: dict[str, Any] = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0] * len(prompts)

    says = [{"role": "user", "content": "a b"}]
    once = Once(reward, {"messages": says}, {"prompt": says}, tok=chat)
    batch = once.prepared().batch
    want = chat("user a b </s> assistant")["input_ids"]
    assert (batch["ids"][..., : len(want)] == want).all()
    assert seen["prompts"] == [says] * 16
    for (message,) in seen["completions"]:
        assert message["role"] == "assistant"
        assert isinstance(message["content"], str)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda prompts: [1.0] * 3, "gave 3 rewards for 16 completions"),
        (lambda prompts: ["1"] * 16, "gave '1' for completion 0; expected a finite number"),
        (lambda prompts: [0.0] * 15 + [np.inf], "gave inf for completion 15"),
        (lambda prompts: [10**400] * 16, "gave 1000+ for completion 0"),
        (lambda prompts: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda prompts: None, "failed: TypeError"),
        (lambda prompts: sys.exit(3), "failed: SystemExit: 3"),
    ],
)
def test_a_reward_that_is_none_names_its_function_and_step(reward, said: str):
    once = Once(reward, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(RewardError, match=f"'<lambda>', asked for step 2, {said}"):
        once.prepared(step=1)


def test_prompts_that_cannot_be_asked_are_told_by_their_lines():
    with pytest.raises(InputError, match=r"a.jsonl:2: the prompt has 14 tokens; expected 1 to 13"):
        Once(nothing, {"prompt": "a"}, {"prompt": "a " * 14})
    with pytest.raises(InputError, match=r"The reward is None; expected a function"):
        Once(None, {"prompt": "a"})


def test_other_columns_are_another_run():
    one, two, three = (
        Once(nothing, {"prompt": "a", "answer": n}).source.fingerprint() for n in (1, 1, 2)
    )
    assert one == two != three
