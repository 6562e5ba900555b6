"""A checkpoint under transforms: what becomes what, what does not fit, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    LEGACY,
    GroupWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    renamings,
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


def array(shape=(), value=None):
    if value is None:
        value = np.random.default_rng(len(shape)).standard_normal(shape)
    return ArrayTensor(np.broadcast_to(np.float32(value), shape).copy())


def named(*names):
    """A tensor for each name, told apart by its value."""
    return {name: array((2,), value) for value, name in enumerate(names)}


def wanted(*names):
    return dict.fromkeys(names, (2,))


def became(view, tensors):
    """The model's name -> the key whose values it has."""
    keys = {tensor.read().tobytes(): key for key, tensor in tensors.items()}
    return {name: keys[tensor.read().tobytes()] for name, tensor in view.items()}


def same(left, right):
    return list(left) == list(right) and all(
        left[k].read().tobytes() == right[k].read().tobytes() and left[k].dtype == right[k].dtype
        for k in left
    )


def equal(left, right):
    return same(dict(sorted(left.items())), dict(sorted(right.items())))


# Names


def test_all_renamings_apply_in_order():
    tensors = named("a.w")
    chain = [WeightRenaming("a", "b"), WeightRenaming("b", "c"), WeightRenaming("x", "y")]
    view = transformed(tensors, chain, wanted("c.w"))
    assert became(view, tensors) == {"c.w": "a.w"}
    assert view.used == tuple(chain[:2])
    assert equal(reverted(view, view.applied), tensors)


def test_a_key_mapping_comes_before_the_transforms_of_the_model():
    tensors = named("xx.old.w")
    chain = [*renamings({r"^xx\.": ""}), WeightRenaming("^old", "new")]
    view = transformed(tensors, chain, wanted("new.w"))
    assert became(view, tensors) == {"new.w": "xx.old.w"}
    assert equal(reverted(view, view.applied), tensors)


def test_what_becomes_no_wanted_name_is_unexpected():
    view = transformed(named("a.w", "z.10", "z.9"), [WeightRenaming("a", "b")], wanted("c.w"))
    assert (dict(view), view.unexpected, view.errors) == ({}, ["a.w", "z.9", "z.10"], {})
    assert view.used == ()


def test_a_name_that_is_wanted_already_is_not_renamed_away():
    tensors = named("encoder.layers.0.w", "layers.1.w")
    rule = [WeightRenaming("layers", "encoder.layers")]
    names = wanted("encoder.layers.0.w", "encoder.layers.1.w")
    view = transformed(tensors, rule, names)
    assert became(view, tensors) == {
        "encoder.layers.0.w": "encoder.layers.0.w",
        "encoder.layers.1.w": "layers.1.w",
    }
    once = reverted(view, view.applied)
    assert equal(once, tensors)
    again = transformed(once, rule, names)
    assert equal(reverted(again, again.applied), tensors)


@pytest.mark.parametrize("rule", [("encoder.layers", "layers"), ("layers", "encoder.layers")])
def test_a_new_model_has_no_doubled_prefix(rule):
    tensors = named("encoder.layers.0.w", "decoder.layers.0.w")
    rules = [WeightRenaming(*rule)]
    back = revert(tensors, rules)
    assert not any("encoder.encoder" in name for name in back)
    view = transformed(back, rules, wanted(*tensors))
    assert equal(dict(view), tensors)


@pytest.mark.parametrize(
    ("key", "name"),
    [("x.w", "model.x.w"), ("model.x.w", "x.w"), ("old.w", "model.x.w"), ("model.old.w", "x.w")],
)
def test_base_and_headed_checkpoints_become_each_other(key, name):
    tensors = named(key)
    view = transformed(tensors, [WeightRenaming("old", "x")], wanted(name))
    assert became(view, tensors) == {name: key}
    assert equal(reverted(view, view.applied), tensors)


def test_the_base_prefix_reaches_what_is_converted():
    tensors = {"qkv.weight": array((6, 2))}
    rule = [WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], [Chunk(0)])]
    names = dict.fromkeys(("model.q.weight", "model.k.weight", "model.v.weight"), (2, 2))
    view = transformed(tensors, rule, names)
    assert list(view) == list(names)
    assert equal(reverted(view, view.applied), tensors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LayerNorm.gamma", "LayerNorm.weight"),
        ("LayerNorm.beta", "LayerNorm.bias"),
        ("conv.weight_g", "conv.parametrizations.weight.original0"),
        ("conv.weight_v", "conv.parametrizations.weight.original1"),
        ("model.language_model.model.x", "model.language_model.x"),
        ("language_model.model.model.x", "model.language_model.x"),
    ],
)
def test_old_names_are_known_but_not_forced_on_who_uses_them(old, new):
    tensors = named(old)
    assert became(transformed(tensors, LEGACY, wanted(new)), tensors) == {new: old}
    renamed = [WeightRenaming("^first", "second"), *LEGACY]
    tensors = named(f"first.{old}")
    view = transformed(tensors, renamed, wanted(f"second.{old}"), base_prefix="")
    assert became(view, tensors) == {f"second.{old}": f"first.{old}"}
    assert view.used == (renamed[0],)


def test_of_two_keys_for_one_name_the_one_that_had_it_wins():
    tensors = named("old.w", "new.w")
    view = transformed(tensors, [WeightRenaming("old", "new")], wanted("new.w"))
    assert became(view, tensors) == {"new.w": "new.w"}
    assert view.unexpected == ["old.w"]


def test_scoped_transforms_reach_their_submodel_only():
    rule = WeightRenaming("^old_q", "q").scoped("vision", "model")
    tensors = named("model.vision.old_q", "model.text.old_q", "old_q")
    view = transformed(tensors, [rule], wanted("model.vision.q", "model.text.q", "q"))
    assert became(view, tensors) == {"model.vision.q": "model.vision.old_q"}
    assert view.unexpected == ["model.text.old_q", "old_q"]


def test_a_nested_scope_is_found_without_the_outer_prefix():
    rule = WeightRenaming("^old_q", "q").scoped("sub", "model")
    tensors = named("sub.old_q")
    view = transformed(tensors, [rule], wanted("model.sub.q"))
    assert became(view, tensors) == {"model.sub.q": "sub.old_q"}
    assert equal(reverted(view, view.applied), tensors)


def test_two_layers_of_a_checkpoint_are_one_of_the_model():
    tensors = named("layers.0.mixer.w", "layers.1.mixer.w", "layers.1.mlp_alpha")
    names = wanted("layers.0.self_attn.w", "layers.0.mlp.w", "layers.0.lambda_2")
    view = transformed(tensors, [LayerPairCollapse()], names)
    assert list(view) == list(names)
    assert equal(reverted(view, view.applied), tensors)


# Guards


def shift():
    return GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])


def norms(layer, shifted):
    first = 0 if shifted else 1
    return [f"l.{layer}.norm{first}.w", f"l.{layer}.norm{first + 1}.w"]


@settings(deadline=None, max_examples=50)
@given(
    layers=st.lists(st.booleans(), min_size=1, max_size=4).flatmap(
        lambda rows: st.tuples(
            st.just(rows), st.permutations([k for i, s in enumerate(rows) for k in norms(i, s)])
        )
    )
)
def test_shifted_and_good_layers_load_in_any_order_of_keys(layers):
    rows, keys = layers
    tensors = named(*keys)
    names = wanted(*(k for i in range(len(rows)) for k in norms(i, False)))
    view = transformed(tensors, [shift()], names)
    expected = {
        good: key
        for i, shifted in enumerate(rows)
        for good, key in zip(norms(i, False), norms(i, shifted), strict=True)
    }
    assert became(view, tensors) == expected
    assert view.unexpected == []
    assert equal(reverted(view, view.applied), tensors)
    assert bool(view.used) == any(rows)


def test_a_layer_without_the_guard_follows_the_others_if_it_is_not_in_order():
    tensors = named("l.0.norm0.w", "l.0.norm1.w", "l.1.norm1.w")
    names = wanted(*norms(0, False), "l.1.norm2.w")
    view = transformed(tensors, [shift()], names)
    assert became(view, tensors)["l.1.norm2.w"] == "l.1.norm1.w"


# Prefix changes


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize(
    ("change", "wrong", "right"),
    [
        (PrefixChange(prefix_to_add="core"), "x.w", "core.x.w"),
        (PrefixChange(prefix_to_remove="core"), "core.x.w", "x.w"),
        (PrefixChange(prefix_to_add="core", model_prefix="sub"), "sub.x.w", "sub.core.x.w"),
        (PrefixChange(prefix_to_remove="core", model_prefix="sub"), "sub.core.x.w", "sub.x.w"),
    ],
)
def test_a_prefix_is_saved_as_it_was_loaded(bad, change, wrong, right):
    tensors = named(wrong if bad else right)
    view = transformed(tensors, [change], wanted(right))
    assert list(view) == [right]
    assert equal(reverted(view, view.applied), tensors)


def test_a_model_that_was_never_loaded_has_neither_prefix_changes_nor_old_names():
    tensors = named("x.w", "conv.parametrizations.weight.original0")
    chain = [PrefixChange(prefix_to_remove="core"), WeightRenaming("^old", "x"), *LEGACY]
    assert sorted(revert(tensors, chain)) == ["conv.parametrizations.weight.original0", "old.w"]


# Conversions


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


# Any table


def stack_rule(m, fused):
    parts = [f"{m}.*.g", f"{m}.*.u"][: 1 + fused]
    ops = [MergeModulelist(0), Concatenate(1)][: 1 + fused]
    return WeightConverter(parts, f"{m}.stacked", ops)


RULES = {
    "same": lambda m: [],
    "rename": lambda m: [WeightRenaming(f"{m}.old", f"{m}.new")],
    "turn": lambda m: [WeightConverter(f"{m}.old", f"{m}.new", [Transpose(0, 1)])],
    "cut": lambda m: [WeightConverter(f"{m}.qkv", [f"{m}.{n}" for n in "qkv"], [Chunk(0)])],
    "join": lambda m: [WeightConverter([f"{m}.q", f"{m}.k"], f"{m}.qk", [Concatenate(0)])],
    "stack": lambda m: [stack_rule(m, fused=False)],
    "fuse": lambda m: [stack_rule(m, fused=True)],
}


def checkpoint_of(kind, at, rows, count):
    """Names and shapes in the checkpoint, and in the model."""
    one, experts = (rows, 2), range(count)
    return {
        "same": ({f"{at}.w": one}, {f"{at}.w": one}),
        "rename": ({f"{at}.old": one}, {f"{at}.new": one}),
        "turn": ({f"{at}.old": one}, {f"{at}.new": (2, rows)}),
        "cut": ({f"{at}.qkv": (3 * rows, 2)}, {f"{at}.{n}": one for n in "qkv"}),
        "join": ({f"{at}.{n}": one for n in "qk"}, {f"{at}.qk": (2 * rows, 2)}),
        "stack": ({f"{at}.{i}.g": one for i in experts}, {f"{at}.stacked": (count, rows, 2)}),
        "fuse": (
            {f"{at}.{i}.{n}": one for i in experts for n in "gu"},
            {f"{at}.stacked": (count, 2 * rows, 2)},
        ),
    }[kind]


@st.composite
def tables(draw):
    """Rules for a few modules, a checkpoint in any order of keys, the shapes of the model."""
    rules, shapes, names = [], {}, {}
    for module in draw(st.permutations(["alpha", "beta", "gamma", "delta"])):
        kind = draw(st.sampled_from(sorted(RULES)))
        rows, count = draw(st.integers(1, 4)), draw(st.integers(1, 12))
        rules += RULES[kind](module)
        for layer in draw(st.sets(st.sampled_from([0, 2, 10]), min_size=1)):
            theirs, ours = checkpoint_of(kind, f"l.{layer}.{module}", rows, count)
            shapes, names = shapes | theirs, names | ours
    values = np.random.default_rng(len(shapes))
    keys = draw(st.permutations(sorted(shapes)))
    return rules, {key: ArrayTensor(values.random(shapes[key])) for key in keys}, names


@settings(deadline=None, max_examples=100)
@given(tables())
def test_what_any_table_does_is_undone_bit_for_bit(table):
    rules, tensors, names = table
    view = transformed(tensors, rules, names)
    assert (view.errors, view.unexpected) == ({}, [])
    assert {name: tensor.shape for name, tensor in view.items()} == names
    assert equal(reverted(view, view.applied), tensors)
    assert equal(revert(dict(view), rules), tensors)
