"""Fitting a checkpoint to a model: what is found is reported at once and in full."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.load import match
from flaxen.convert.relation import relate
from flaxen.convert.report import Mismatch, Report, fold
from flaxen.core.errors import CheckpointError
from flaxen.core.tree import param

NAMES = {"layers": "model.layers", "embed_tokens": "model.embed_tokens"}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
EMBED = np.arange(10, dtype=np.float32).reshape(5, 2)


def model(head=False, layers=3):
    tree = {
        "embed_tokens": {"weight": param(vocab=5, embed=2)},
        "layers": [{"norm": {"weight": param(embed=2)}} for _ in range(layers)],
    }
    return relate(tree | ({"lm_head": {"weight": param(vocab=5, embed=2)}} if head else {}), NAMES)


def checkpoint(head=None, prefix="model."):
    arrays = {f"{prefix}embed_tokens.weight": EMBED}
    arrays |= {f"{prefix}layers.{i}.norm.weight": np.full(2, i, np.float32) for i in range(3)}
    arrays |= {} if head is None else {"lm_head.weight": head}
    return {name: ArrayTensor(array) for name, array in arrays.items()}


def test_a_checkpoint_that_fits_has_nothing_to_report():
    weights, report, *_ = match(model(), checkpoint(), tied=TIED)
    assert set(weights) == {
        "embed_tokens.weight",
        *(f"layers.{i}.norm.weight" for i in range(3)),
    }
    assert report == Report(tied=TIED)
    report.raise_if_bad()


def test_tied_and_equal_loads():
    weights, report, *_ = match(model(), checkpoint(EMBED.copy()), tied=TIED)
    report.raise_if_bad()
    assert report.tied == TIED and len(weights) == 4


@pytest.mark.parametrize(
    "head", [EMBED + 1, EMBED[:4], EMBED.astype(np.float64), np.where(EMBED == 0, -0.0, EMBED)]
)
def test_tied_and_different_is_reported(head):
    _, report, *_ = match(model(), checkpoint(head), tied=TIED)
    assert report.untied == [("lm_head.weight", "model.embed_tokens.weight")] and not report.tied
    with pytest.raises(CheckpointError, match=r"untied\s+lm_head.weight\s+differs"):
        report.raise_if_bad()


def test_untied_and_absent_is_an_error():
    _, report, *_ = match(model(head=True), checkpoint(), tied={})
    with pytest.raises(CheckpointError, match=r"missing\s+lm_head\.weight"):
        report.raise_if_bad()


def test_untied_and_present_loads_both():
    weights, report, *_ = match(model(head=True), checkpoint(EMBED + 1), tied={})
    report.raise_if_bad()
    np.testing.assert_array_equal(weights["lm_head.weight"].read(), EMBED + 1)


def test_a_tied_weight_is_found_under_the_name_of_its_head():
    tensors = checkpoint(EMBED)
    del tensors["model.embed_tokens.weight"]
    weights, report, *_ = match(model(), tensors, tied=TIED)
    report.raise_if_bad()
    np.testing.assert_array_equal(weights["embed_tokens.weight"].read(), EMBED)


@pytest.mark.parametrize("names", [NAMES, {}])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_base_model_loads_into_a_head_model_and_back(names, prefix):
    tree = {"embed_tokens": {"weight": param(vocab=5, embed=2)}, "layers": []}
    tensors = {f"{prefix}embed_tokens.weight": ArrayTensor(EMBED)}
    weights, report, *_ = match(relate(tree, names), tensors)
    report.raise_if_bad()
    np.testing.assert_array_equal(weights["embed_tokens.weight"].read(), EMBED)


def test_computed_buffers_of_old_checkpoints_are_passed_over():
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq", "position_ids", "x.position_ids"]
    tensors = checkpoint() | dict.fromkeys(old, ArrayTensor(EMBED))
    assert match(model(), tensors)[1].unexpected == []


def test_all_problems_come_in_one_error_with_numbers_folded():
    tensors = checkpoint(prefix="model.")
    del tensors["model.embed_tokens.weight"]
    tensors["model.layers.1.norm.weight"] = ArrayTensor(np.zeros(3, np.float32))
    tensors |= {f"model.layers.{i}.extra": ArrayTensor(EMBED) for i in range(32)}
    weights, report, *_ = match(model(layers=14), tensors)
    assert "layers.1.norm.weight" not in weights and "layers.2.norm.weight" in weights
    assert report.mismatched == [Mismatch("model.layers.1.norm.weight", (3,), (2,))]
    with pytest.raises(CheckpointError) as error:
        report.raise_if_bad()
    for line in (
        "missing     model.embed_tokens.weight",
        "missing     model.layers.{3...13}.norm.weight",
        "unexpected  model.layers.{0...31}.extra",
        "mismatched  model.layers.1.norm.weight",
        "found [3], expected [2]",
    ):
        assert line in str(error.value)


def test_only_wrong_shapes_are_errors_when_not_strict():
    Report(missing=["a"], unexpected=["b"], untied=[("c", "d")]).raise_if_bad(strict=False)
    with pytest.raises(CheckpointError, match="mismatched"):
        Report(mismatched=[Mismatch("a", (1,), (2,))]).raise_if_bad(strict=False)


def test_a_missing_expert_is_named_and_its_stack_left_out():
    tree = {"experts": {"up_proj": {"weight": param("mlp embed", experts=12, mlp=4, embed=4)}}}
    relation = relate(tree, {"experts": "experts.{experts}"})
    tensors = {name: ArrayTensor(np.zeros((4, 4))) for name in relation.names()}
    del tensors["experts.7.up_proj.weight"]
    weights, report, *_ = match(relation, tensors)
    assert weights == {}
    with pytest.raises(CheckpointError, match=r"missing\s+experts\.7\.up_proj\.weight"):
        report.raise_if_bad()


def test_experts_of_two_dtypes_stack_in_the_wider_one():
    tree = {"experts": {"w": param("mlp", experts=2, mlp=4)}}
    kinds = [np.float32, ml_dtypes.bfloat16]
    tensors = {f"experts.{i}.w": ArrayTensor(np.ones(4, k)) for i, k in enumerate(kinds)}
    weights, _, *_ = match(relate(tree, {"experts": "experts.{experts}"}), tensors)
    assert weights["experts.w"].read().dtype == np.float32


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a.0.x", "a.1.x", "a.2.x"], ["a.{0...2}.x"]),
        (["a.0.x", "a.2.x"], ["a.{0, 2}.x"]),
        (["a.5.x", "b"], ["a.5.x", "b"]),
        ([f"l.{i}.e.{j}.w" for i in range(40) for j in range(9)], ["l.{0...39}.e.{0...8}.w"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.{0, 1}", "l.1.e.0"]),
        ([f"a.{i}" for i in range(0, 40, 2)], ["a.{0, 2, 4, 6, 8, 10, 12, 14, ... 38}"]),
        ([], []),
    ],
)
def test_folding(names, folded):
    assert fold(names) == folded


def test_the_summary_tells_bytes_rate_and_what_was_unusual():
    report = Report(tied=TIED, unread=["foo"], bytes_read=2_000_000_000, seconds=0.5)
    lines = report.summary().splitlines()
    assert lines[0] == "2.00 GB in 0.50 s (4.0 GB/s)"
    assert [line.split()[0] for line in lines[1:]] == ["tied", "unread"]
