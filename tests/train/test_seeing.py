"""What a run tells, to whom, and that one which goes on tells nothing twice."""

from __future__ import annotations

import csv
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny_decoder import tiny
from watched_runs import scalars, stand_in
from words import word_tokenizer

from flaxen.layers.runtime import Runtime
from flaxen.models.causal import forward
from flaxen.show.flops import model_flops
from flaxen.train import train
from flaxen.train.run.costs import Costs
from flaxen.train.run.evaluate import mean_losses

SETTINGS = {
    "steps": 6,
    "batch_size": 2,
    "seq_len": 8,
    "learning_rate": 1e-2,
    "lora_rank": 2,
    "lora_targets": ["q_proj"],
    "save_every": 3,
    "eval_every": 2,
    "eval_batches": 2,
    "report_to": ["tensorboard", "wandb", "trackio"],
    "project": "tests",
    "sample_prompts": ["w20 w21", "w30 w31 w32 w33"],
    "sample_tokens": 4,
    "peak_flops": 1e12,
}


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run that breaks after step 5, goes on from step 3, and ends."""
    folder = tmp_path_factory.mktemp("seen")
    data, output = folder / "learned.jsonl", folder / "first run"
    draw = np.random.default_rng(0)
    starts = [int(x) for x in draw.integers(10, 80, 30)]
    lines = [{"text": " ".join(f"w{x + i % 3}" for i in range(6))} for x in starts]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tok = word_tokenizer(90)

    def on_step(row):
        if row["step"] == 5:
            raise Broken

    with pytest.MonkeyPatch.context() as patch:
        services = {name: stand_in(patch, name) for name in ("wandb", "trackio")}
        common = {"eval_data": data, "output": output, "progress": False} | SETTINGS
        with pytest.raises(Broken):
            train(tiny(), tok, data, on_step=on_step, **common)
        result = train(tiny(), tok, data, resume=True, **common)
    return result, services


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_says_what_the_log_says(told):
    result, _ = told
    with (result.output / "log.csv").open(newline="") as file:
        table = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert table == rows_of(result.log_path)


def test_a_row_tells_memory_and_the_share_of_the_peak(told):
    result, _ = told
    row = next(row for row in result.rows if "loss" in row)
    assert row["memory_bytes"] > 1e6
    plain = model_flops(tiny().module, 8, 2, training=False)
    # Frozen weights have no gradient: twice the forward pass, and a little for the adapters.
    assert 2 * plain < row["mfu"] * row["seconds"] * 1e12 < 2.5 * plain


def test_an_evaluation_tells_loss_perplexity_and_time(told):
    result, _ = told
    tests = [row for row in result.rows if "eval_loss" in row]
    assert [row["step"] for row in tests] == [0, 2, 3, 4, 6]
    for row in tests:
        assert row["perplexity"] == pytest.approx(np.exp(row["eval_loss"]))
        assert row["eval_seconds"] > 0


def test_samples_are_what_the_model_says_greedily(told):
    result, _ = told
    rows = rows_of(result.output / "samples.jsonl")
    assert [(row["step"], row["number"]) for row in rows] == [
        (step, number) for step in (0, 2, 3, 4, 6) for number in (0, 1)
    ]
    tok = word_tokenizer(90)
    for row, prompt in zip(rows[-2:], SETTINGS["sample_prompts"], strict=True):
        ids = tok(prompt)["input_ids"]
        for _ in range(4):
            padded = jnp.asarray([ids + [0] * (8 - len(ids))])
            logits = forward(result.model.module, padded, runtime=result.model.runtime).logits
            ids.append(int(logits[0, len(ids) - 1].argmax()))
        assert row["prompt"] == prompt
        assert row["text"] == tok.decode(ids[-4:], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_hears_every_row_once_under_one_name(told, name):
    result, services = told
    service = services[name]
    first, second = service.began
    key = "id" if name == "wandb" else "name"
    assert first[key] == second[key] and first[key].startswith("first-run-")
    assert first["resume"] == second["resume"] == "allow"
    assert first["project"] == "tests" and first["config"]["lora_rank"] == 2
    heard = service.told[first[key]]
    steps = {at: values["train/loss"] for at, values in heard if "train/loss" in values}
    assert steps == {row["step"]: row["loss"] for row in result.rows if "loss" in row}
    tests = [at for at, values in heard if "eval/perplexity" in values]
    assert len(heard) == len(steps) + len(tests) + 2 * 5 and sorted(tests) == [0, 2, 3, 4, 6]


def test_wandb_is_told_that_the_first_part_failed(told):
    assert told[1]["wandb"].ended == [1, 0]


def test_tensorboard_draws_one_curve(told):
    result, _ = told
    drawn = scalars(result.output / "tensorboard")
    losses = [(step, value) for tag, step, value in drawn if tag == "train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([value for _, value in losses], result.losses, rtol=1e-6)
    assert [step for tag, step, _ in drawn if tag == "eval/perplexity"] == [0, 2, 3, 4, 6]


def front_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_a_card_lies_beside_the_weights(told):
    result, _ = told
    card = (result.model_path / "README.md").read_text()
    assert front_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flaxen", "jax", "causal", "lora"],
    }
    assert "`learned.jsonl`" in card and "| examples | 30 |" in card
    assert "| `lora_rank` | `2` |" in card and "weight_decay" not in card
    last = [row for row in result.rows if "perplexity" in row][-1]
    assert re.search(rf"\| perplexity \| .* → {last['perplexity']:.4g} \|", card)
    assert "![Loss](loss.png)" in card and (result.model_path / "loss.png").exists()
    adapter = (result.adapter_path / "README.md").read_text()
    assert front_of(adapter)["library_name"] == "peft"
    # Nothing can load a base that came from no folder.
    assert 'base.load_adapter("adapter")' in adapter and "from_pretrained" not in adapter


def test_only_so_many_batches_are_evaluated():
    """Of weights 1, 2, 3 and 4 the first two."""
    space = types.SimpleNamespace
    evaluate = lambda state, frozen, batch: (6.0 * batch["n"], {"accuracy": 1.0}, batch["n"])
    run = space(
        held_out=space(per_epoch=4, batch_at=lambda i: {"n": np.float32(i + 1)}),
        trainer=space(evaluate=evaluate, frozen=None),
        runtime=Runtime(),
        config=space(eval_batches=2),
    )
    found = mean_losses(run, run.held_out, None, lambda: 0)
    assert found == {"loss": pytest.approx(6.0), "accuracy": pytest.approx(2 / 3)}


def test_a_steps_operations_are_those_of_all_its_micro_batches():
    tree, batch = tiny().module, {"ids": np.zeros((3, 2, 8), np.int32)}
    costs = Costs(tree, Runtime(), peak=1e9)
    assert costs.flops(batch) == model_flops(tree, 8, 6)
    assert costs.told(2e9, seconds=4.0)["mfu"] == pytest.approx(0.5)


def test_the_peak_is_that_of_all_devices():
    model = tiny(mesh="fsdp=4,tp=2")
    costs = Costs(model.module, model.runtime, peak=1e9)
    assert costs.told(8e9, seconds=1.0)["mfu"] == pytest.approx(1.0)


def test_a_peak_can_be_measured_but_is_not_guessed():
    tree, batch = tiny().module, {"ids": np.zeros((1, 2, 8), np.int32)}
    assert Costs(tree, Runtime(), None).flops(batch) is None
    assert 1e8 < Costs(tree, Runtime(), "measured").peak < 1e14


@pytest.mark.exhaustive
def test_a_run_may_begin_without_an_evaluation(tmp_path):
    data = tmp_path / "a.txt"
    data.write_text("w10 w11 w12 w13")
    given = {"steps": 1, "batch_size": 1, "seq_len": 8, "lora_rank": 2, "lora_targets": ["q_proj"]}
    result = train(
        tiny(),
        word_tokenizer(90),
        data,
        eval_data=data,
        output=tmp_path / "o",
        eval_at_start=False,
        progress=False,
        **given,
    )
    assert [row["step"] for row in result.rows if "eval_loss" in row] == [1]
    assert not any("mfu" in row for row in result.rows)
