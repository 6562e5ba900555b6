"""Bytes from shapes, against hand counts and against the compiler."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import pytest

from flaxen.core.errors import ConfigError, FlaxenError, PlanError
from flaxen.plan import Job, prepare, target
from flaxen.plan.budget import inference, training
from flaxen.plan.compile import compile_inference, compile_step, refused
from flaxen.plan.residuals import kept
from flaxen.plan.suggest import suggestions

TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER = 4 * 64 * 64 + 3 * 64 * 128
WEIGHTS = 2 * LAYER + 2 * 272 * 64
NORMS = (2 * 2 + 1) * 64
ROWS, T = 8, 32

JOB = Job(config=TOY, mesh={"fsdp": 8}, batch=ROWS, seq=T, remat="block")


def changed(**changes) -> Job:
    return dataclasses.replace(JOB, **changes)


def test_masters_and_moments_are_float32_and_cut_but_for_norms():
    found = training(JOB, "cpu")
    each = 4 * (WEIGHTS // 8 + NORMS)
    assert found.weights == each
    # Two moments, and Adam's count of steps.
    assert found.optimizer == 2 * each + 4
    assert found.copies == each // 2 and found.loaded == each // 2


def test_adapters_leave_the_weights_as_they_are():
    found = training(changed(train="lora", lora_rank=4), "cpu")
    low = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert found.weights > 2 * (WEIGHTS // 8 + NORMS)
    assert found.weights + found.optimizer < 2 * (WEIGHTS // 8 + NORMS) + 3 * 4 * low + 4
    assert found.copies == found.loaded == 0


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("lion", 1), ("momentum", 1)])
def test_other_optimisers_remember_less(optimizer: str, moments: int):
    found = training(changed(optimizer=optimizer), "cpu")
    assert found.optimizer // 8 == moments * found.weights // 8


def test_a_checkpointed_layer_keeps_its_input_alone():
    layers = lambda x: x.shape[:1] == (2,)
    count = lambda remat: sum(x.size for x in kept(JOB, remat, "cpu") if layers(x))
    assert count("block") == 2 * ROWS * T * 64
    assert count("block") < count("dots") and count("block") < count(None)


def test_a_batch_in_pieces_keeps_less():
    pieces = changed(batch=3 * ROWS, accumulation=3)
    whole = training(changed(batch=3 * ROWS), "cpu").activations
    assert training(pieces, "cpu").activations == pytest.approx(whole / 3, rel=0.1)


def test_what_the_step_is_given_is_what_the_compiler_says():
    job = changed(mesh={"fsdp": 4, "tp": 2})
    found = compile_step(job, jax.devices(), "cpu")
    # Besides them, the batch and some numbers.
    assert found.arguments == pytest.approx(training(job, "cpu").arguments, rel=0.01)


def test_what_inference_is_given_is_what_the_compiler_says():
    job = changed(train="none", mesh={"fsdp": 2, "tp": 4}, seq=64)
    found = compile_inference(job, jax.devices(), "cpu")
    expected = inference(job)
    assert [c.program for c in found] == ["prefill", "decode"]
    for built, budget in zip(found, expected, strict=True):
        assert built.arguments == pytest.approx(budget.arguments, rel=0.02)
        # The cache is given back where it was.
        assert built.aliased == pytest.approx(budget.cache, rel=0.05)
    cache = 2 * 2 * ROWS * 64 * 4 * 16 * 2 // 8
    assert expected[0].cache == pytest.approx(cache, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_step_on_a_tpu_needs_what_the_budget_says():
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 8}
    wide |= {"num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 2048}
    job = changed(config=TOY | wide, seq=512)
    chips = target("v5p:2x2x2")
    found = compile_step(job, chips.devices(), "tpu")
    assert found.peak == pytest.approx(training(job, "tpu").program_bytes, rel=0.05)


def test_the_nearest_plan_that_fits_changes_least():
    job = changed(remat=None, seq=512)
    estimate = lambda other: training(other, "cpu")
    without, with_remat = estimate(job).total, estimate(changed(seq=512)).total
    found = suggestions(job, (without + with_remat) // 2, estimate)
    assert found and found[0].changes in (("--remat block",), ("--remat dots_with_no_batch_dims",))
    assert all(each.budget.total <= (without + with_remat) // 2 for each in found)


def test_where_nothing_near_is_enough_more_devices_are():
    estimate = lambda other: training(other, "cpu")
    job = changed(train="lora", mesh={"fsdp": 2}, seq=2)
    least = estimate(dataclasses.replace(job, mesh={"fsdp": 4})).total
    (first, *_) = suggestions(job, least, estimate)
    assert "on 4 devices" in first.changes[-1]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="6 rows do not divide among the 8"):
        changed(batch=6)
    with pytest.raises(ConfigError, match="3 micro-batches"):
        changed(accumulation=3)


def test_a_model_without_a_text_to_go_on_with_is_refused():
    with pytest.raises(FlaxenError, match="be planned"):
        changed(config={"model_type": "bert"}).module  # noqa: B018


@pytest.mark.parametrize("text", ["v5p", "v5p:2y2", "cpu:0", "cpu:9999999"])
def test_a_topology_is_a_chip_and_a_size(text: str):
    with pytest.raises(PlanError):
        target(text)


def test_an_unknown_chip_is_told_with_those_that_are_known():
    with pytest.raises(PlanError, match="'v9:2x2'|no chip 'v9'"):
        target("v9:2x2")


@pytest.mark.parametrize(
    ("text", "count", "platform"),
    [("v5p:4x4x4", 64, "tpu"), ("7x:2x2x1", 8, "tpu"), ("h100:8", 8, "cpu"), ("cpu:8", 8, "cpu")],
)
def test_devices_of_a_topology_are_counted_as_jax_does(text: str, count: int, platform: str):
    found = target(text)
    prepare(dataclasses.replace(found, virtual=False))
    assert (found.count, found.platform) == (count, platform)


@pytest.mark.parametrize(
    ("message", "gigabytes"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (16.62G) exceeds available HBM (15.75G). HLO ...",
            16.62,
        ),
        ("Ran out of memory in memory space hbm. Used 20.99G of 15.48G hbm. Exceeded", 20.99),
    ],
)
def test_a_compiler_without_room_says_how_much_it_wants(message: str, gigabytes: float):
    found = refused("train", message, 1.0)
    assert not found.fits and found.peak == int(gigabytes * 2**30)


def test_another_refusal_is_an_error():
    with pytest.raises(PlanError, match="does not compile: INVALID"):
        refused("train", "INVALID_ARGUMENT: no such thing", 1.0)
