"""Tensors converted under transforms: stacked, cut, joined, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from named_tensors import array, equal, named, wanted

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.ops import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    VisionUnfuseAndPermuteForRope,
)
from flaxen.convert.transforms import (
    WeightConverter,
    WeightRenaming,
    revert,
    reverted,
    transformed,
)

EXPERTS = 12
MOE = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
FUSED = "model.layers.{}.mlp.experts.{}"
WANTED_MOE = {FUSED.format(layer, "gate_up_proj"): (EXPERTS, 4, 2) for layer in (0, 1)} | {
    FUSED.format(layer, "down_proj"): (EXPERTS, 2, 2) for layer in (0, 1)
}


def moe_transforms():
    return [
        WeightRenaming(".block_sparse_moe.", ".mlp."),
        WeightConverter(
            [".experts.*.w1.weight", ".experts.*.w3.weight"],
            ".experts.gate_up_proj",
            [MergeModulelist(0), Concatenate(1)],
        ),
        WeightConverter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(0)]),
    ]


def moe_checkpoint(layers=(0, 1)):
    """Expert i is filled with i, its w3 with 100 + i."""
    return {
        MOE.format(layer, expert, name): array((2, 2), expert + 100 * (name == "w3"))
        for layer in layers
        for expert in range(EXPERTS)
        for name in ("w1", "w2", "w3")
    }


def fused_checkpoint(layers=(0, 1)):
    """The same in the model's own layout."""
    index = np.arange(EXPERTS, dtype=np.float32).reshape(-1, 1, 1)
    down = np.broadcast_to(index, (EXPERTS, 2, 2))
    gate_up = np.concatenate([down, down + 100], 1)
    return {FUSED.format(layer, "gate_up_proj"): ArrayTensor(gate_up) for layer in layers} | {
        FUSED.format(layer, "down_proj"): ArrayTensor(np.array(down)) for layer in layers
    }


def test_experts_are_stacked_in_the_order_of_their_numbers():
    view = transformed(moe_checkpoint(), moe_transforms(), WANTED_MOE)
    assert (view.unexpected, view.errors) == ([], {})
    assert equal(view, fused_checkpoint())
    assert equal(reverted(view, view.applied), moe_checkpoint())


def test_a_checkpoint_in_the_layout_of_the_model_is_taken_and_saved_as_it_is():
    view = transformed(fused_checkpoint(), moe_transforms(), WANTED_MOE)
    assert equal(view, fused_checkpoint())
    assert view.used == ()
    assert equal(reverted(view, view.applied), fused_checkpoint())


def test_half_of_the_layers_may_be_converted_already():
    half = moe_checkpoint([0]) | fused_checkpoint([1])
    view = transformed(half, moe_transforms(), WANTED_MOE)
    assert equal(view, fused_checkpoint())
    assert equal(reverted(view, view.applied), half)


def test_what_is_there_in_both_layouts_stands_as_it_is():
    fused = {name: array(shape, 7) for name, shape in WANTED_MOE.items() if ".0." in name}
    view = transformed(moe_checkpoint() | fused, moe_transforms(), WANTED_MOE)
    assert view.errors == {}
    assert set(view.unexpected) == set(moe_checkpoint([0]))
    assert equal(view, fused | fused_checkpoint([1]))
    assert equal(reverted(view, view.applied), fused | moe_checkpoint([1]))


def test_what_stands_is_not_replaced_by_a_part_of_what_is_converted():
    rule = [WeightConverter("qkv.w", ["q.w", "k.w"], [Chunk(0)])]
    tensors = {"qkv.w": array((4, 2), 1), "q.w": array((2, 2), 2)}
    view = transformed(tensors, rule, {"q.w": (2, 2), "k.w": (2, 2)})
    assert (view["q.w"].read()[0, 0], view["k.w"].read()[0, 0]) == (2, 1)
    assert reverted(view, view.applied).keys() == tensors.keys()


def test_a_new_model_fuses_only_what_would_come_apart_again():
    rule = [WeightConverter("^qkv", ["q", "k"], [Chunk(0)])]
    back = revert({f"{at}{n}.w": array((2, 2)) for at in ("", "vision.") for n in "qk"}, rule)
    assert sorted(back) == ["qkv.w", "vision.k.w", "vision.q.w"]


def test_a_new_model_is_saved_expert_by_expert():
    assert equal(revert(fused_checkpoint(), moe_transforms()), moe_checkpoint())


def test_tensors_that_came_later_are_saved_by_the_transforms_of_the_others():
    view = transformed(moe_checkpoint(), moe_transforms(), WANTED_MOE)
    later = {
        "model.layers.2.mlp.gate.weight": array((2,), 3),
        "model.layers.2.mlp.experts.down_proj": array((EXPERTS, 2, 2), 4),
    }
    back = reverted(dict(view) | later, view.applied)
    new = back.keys() - moe_checkpoint().keys()
    assert new == {MOE.format(2, i, "w2") for i in range(EXPERTS)} | {
        "model.layers.2.block_sparse_moe.gate.weight"
    }


def test_what_was_converted_together_is_saved_together():
    rule = [WeightConverter("qkv.w", ["q.w", "k.w"], [Chunk(0)])]
    view = transformed({"qkv.w": array((4, 2))}, rule, {"q.w": (2, 2), "k.w": (2, 2)})
    with pytest.raises(ValueError, match=r"\['k.w'\] are not here"):
        reverted({"q.w": view["q.w"]}, view.applied)


GONE = [
    (["7.w2"], "down_proj", "experts.7.w2.weight"),
    (["11.w2"], "down_proj", "experts.11.w2.weight"),
    (["7.w1"], "gate_up_proj", "experts.7.w1.weight"),
    (["7.w1", "7.w3"], "gate_up_proj", "experts.7.w1.weight"),
    (["7.w1", "8.w3"], "gate_up_proj", "experts.8.w3.weight"),
    ([f"{i}.w3" for i in range(EXPERTS)], "gate_up_proj", "experts.*.w3.weight"),
    ([f"{i}.w3" for i in range(1, EXPERTS)], "gate_up_proj", "experts.8.w3.weight and 3 more"),
]


@pytest.mark.parametrize(("gone", "target", "said"), GONE)
def test_an_expert_that_is_not_there_is_named(gone, target, said):
    absent = [MOE.format(0, *part.split(".")) for part in gone]
    tensors = {key: t for key, t in moe_checkpoint().items() if key not in absent}
    view = transformed(tensors, moe_transforms(), WANTED_MOE)
    name = FUSED.format(0, target)
    assert list(view.errors) == [name]
    assert said in view.errors[name]
    assert view.keys() == WANTED_MOE.keys() - {name}


def test_an_expert_of_another_shape_is_named():
    odd = {MOE.format(1, 3, "w2"): array((3, 3))}
    view = transformed(moe_checkpoint() | odd, moe_transforms(), WANTED_MOE)
    [(name, text)] = view.errors.items()
    assert name == FUSED.format(1, "down_proj")
    assert f"{MOE.format(1, 3, 'w2')} is float32[3, 3], the others are float32[2, 2]" in text


def test_a_tensor_of_another_shape_is_for_the_loader_to_judge():
    rule = [WeightConverter("qkv.w", ["q.w", "k.w"], [Chunk(0)])]
    view = transformed({"qkv.w": array((8, 2))}, rule, {"q.w": (2, 2), "k.w": (2, 2)})
    assert (view["q.w"].shape, view.errors) == ((4, 2), {})


def test_an_operation_of_a_user_may_fail_in_any_way():
    class Broken(Transpose):
        def convert(self, input_dict, *args, **kwargs):
            raise KeyError("no such thing")

    view = transformed(named("a.w"), [WeightConverter("a.w", "b.w", [Broken()])], wanted("b.w"))
    assert "no such thing" in view.errors["b.w"]


def test_a_pattern_may_name_one_layer_only():
    rule = [WeightConverter(r"layers\.0\.qkv", ["layers.0.q", "layers.0.k"], [Chunk(0)])]
    tensors = {f"layers.{i}.qkv": array((4, 2)) for i in (0, 1)}
    names = {f"layers.{i}.{n}": (2, 2) for i in (0, 1) for n in "qk"}
    view = transformed(tensors, rule, names)
    assert (list(view), view.unexpected) == (["layers.0.q", "layers.0.k"], ["layers.1.qkv"])


def test_a_captured_number_reaches_every_target():
    rule = [WeightConverter(r"h\.(\d+)\.qkv", [r"layers.\1.q", r"layers.\1.k"], [Chunk(0)])]
    tensors = {f"h.{i}.qkv.w": array((4, 2), i) for i in (3, 10)}
    names = {f"layers.{i}.{n}.w": (2, 2) for i in (3, 10) for n in "qk"}
    view = transformed(tensors, rule, names)
    assert list(view) == list(names)
    assert equal(reverted(view, view.applied), tensors)
    assert equal(revert(dict(view), rule), tensors)


def test_grouped_queries_and_keys_are_cut_to_measure_and_put_back():
    rule = [WeightConverter("qkv", ["q_proj", "k_proj", "v_proj"], [Chunk(0)])]
    tensors = {"qkv.weight": array((8, 3)), "qkv.bias": array((8,))}
    rows = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    names = {f"{n}.bias": (size,) for n, size in rows.items()}
    names |= {f"{n}.weight": (size, 3) for n, size in rows.items()}
    view = transformed(tensors, rule, names)
    assert {name: t.shape for name, t in view.items()} == names
    assert equal(reverted(view, view.applied), tensors)


@pytest.mark.parametrize("sizes", [(4, 2, 2), (1, 5, 3)])
def test_unequal_parts_that_were_joined_come_apart_where_they_were_joined(sizes):
    rule = [WeightConverter(["q.w", "k.w", "v.w"], "qkv.w", [Concatenate(0)])]
    tensors = {f"{n}.w": array((size, 3), size) for n, size in zip("qkv", sizes, strict=True)}
    view = transformed(tensors, rule, {"qkv.w": (sum(sizes), 3)})
    assert equal(reverted(view, view.applied), tensors)


def test_a_short_last_chunk_comes_back():
    rule = [WeightConverter("x.w", ["a.w", "b.w", "c.w"], [Chunk(0)])]
    tensors = {"x.w": array((8, 2))}
    names = {"a.w": (3, 2), "b.w": (3, 2), "c.w": (2, 2)}
    view = transformed(tensors, rule, names)
    assert {name: t.shape for name, t in view.items()} == names
    assert equal(reverted(view, view.applied), tensors)


def test_a_stack_comes_apart_into_numbered_names_and_back():
    rule = [WeightConverter("experts.all", "experts.*.w", [SplitModulelist(0)])]
    tensors = {"m.experts.all": array((EXPERTS, 2))}
    view = transformed(tensors, rule, {f"m.experts.{i}.w": (2,) for i in range(EXPERTS)})
    assert list(view)[10] == "m.experts.10.w"
    assert equal(reverted(view, view.applied), tensors)


def test_renamings_come_back_after_conversions():
    chain = [
        WeightRenaming("^decoder", "encoder"),
        WeightConverter("attn.qkv", ["attn.q", "attn.k", "attn.v"], [Chunk(0)]),
    ]
    tensors = {"decoder.attn.qkv": array((6, 2))}
    view = transformed(tensors, chain, {f"encoder.attn.{n}": (2, 2) for n in "qkv"})
    assert equal(reverted(view, view.applied), tensors)
    assert equal(revert(dict(view), chain), tensors)


def test_text_and_vision_experts_part_and_meet():
    rule = [
        WeightConverter(
            ["experts.*.gate.w", "experts.*.up.w"],
            ["text.gate_up", "vision.gate_up"],
            [ErnieFuseAndSplitTextVisionExperts(0, 1)],
        )
    ]
    tensors = {
        f"experts.{i}.{n}.w": array((2, 3), 10 * i + (n == "up"))
        for i in range(4)
        for n in ("gate", "up")
    }
    view = transformed(tensors, rule, {"text.gate_up": (2, 4, 3), "vision.gate_up": (2, 4, 3)})
    assert view["vision.gate_up"].read()[:, 0, 0].tolist() == [20, 30]
    assert view["text.gate_up"].read()[1, :, 0].tolist() == [10, 10, 11, 11]
    assert equal(reverted(view, view.applied), tensors)


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_fused_vision_queries_are_permuted_and_restored():
    operation = VisionUnfuseAndPermuteForRope(0, ["q_proj", "k_proj"])
    rule = [WeightConverter("qkv", ["q_proj", "k_proj", "v_proj"], [operation])]
    tensors = {"qkv.weight": ArrayTensor(np.arange(24, dtype=np.float32).reshape(24, 1))}
    config = {"vision_config": {"num_attention_heads": 2}}
    names = {f"{n}_proj.weight": (8, 1) for n in "qkv"}
    view = transformed(tensors, rule, names, config=config)
    assert view["q_proj.weight"].read()[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert view["v_proj.weight"].read()[:, 0].tolist() == list(range(16, 24))
    assert equal(reverted(view, view.applied), tensors)


def test_nothing_is_read_until_a_box_is_asked_for():
    tensors = moe_checkpoint()
    view = transformed(tensors, moe_transforms(), WANTED_MOE)
    view[FUSED.format(0, "gate_up_proj")].read((slice(10, 11), slice(0, 2), slice(0, 2)))
    read = [key for key, tensor in tensors.items() if tensor.counter.total]
    assert read == [MOE.format(0, 10, "w1")]
