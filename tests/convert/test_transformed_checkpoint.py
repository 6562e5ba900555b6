"""A checkpoint under transforms: what each name becomes, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from named_tensors import array, became, equal, named, wanted

from flaxen.convert.ops import Chunk
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


def test_a_new_model_keeps_a_name_that_could_not_be_found_again():
    rule = [WeightRenaming(r"^model(?!\.visual)", "model.text")]
    tensors = named("model.text.visual.w", "model.text.layers.0.w")
    back = revert(tensors, rule)
    assert list(back) == ["model.layers.0.w", "model.text.visual.w"]
    assert equal(transformed(back, rule, wanted(*tensors)), tensors)


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


@pytest.mark.parametrize(("old", "new"), [("a.w", "b.w"), ("b.w", "a.w")])
def test_of_two_keys_for_one_name_the_one_that_had_it_wins(old, new):
    tensors = named(old, new)
    view = transformed(tensors, [WeightRenaming(old, new)], wanted(new))
    assert became(view, tensors) == {new: new}
    assert view.unexpected == [old]


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


def test_without_a_guard_nothing_moves():
    tensors = named("l.0.norm1.w")
    view = transformed(tensors, [shift()], wanted(*norms(0, False)))
    assert list(view) == ["l.0.norm1.w"]


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


def test_of_two_layouts_in_part_the_converted_one_is_unexpected():
    """One piece of a joined tensor is there by itself too: nobody knows which is right."""
    split = WeightConverter("qk", ["q", "k"], [Chunk(0)])
    tensors = {"a.qk": array((4,)), "a.q": array((2,), 1)}
    view = transformed(tensors, [split], wanted("a.q", "a.k"))
    assert view.unexpected == ["a.qk"]
    assert (view["a.q"].read() == 1).all()
