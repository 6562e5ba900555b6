"""The registry, scopes and guards of transforms."""

from __future__ import annotations

import pytest

from flaxen.convert.ops import Chunk, Concatenate
from flaxen.convert.transforms import (
    GroupWeightRename,
    IndexOffsetWeightRename,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
    registry,
    renamings,
    transforms_of,
)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_MAPPINGS", {})


def register(name, source="a", target="b"):
    register_checkpoint_conversion_mapping(name, [WeightRenaming(source, target)])


def scopes(transforms):
    return [(t.source_patterns[0], t.scope_prefix, t.base_model_prefix) for t in transforms]


def test_a_name_is_registered_once():
    register("kind", "a")
    with pytest.raises(ValueError, match="'kind' already exists. Pass overwrite=True"):
        register("kind", "c")
    register_checkpoint_conversion_mapping("kind", [WeightRenaming("c", "d")], overwrite=True)
    assert scopes(get_checkpoint_conversion_mapping("kind")) == [("c", None, None)]


def test_an_unknown_name_has_no_mapping():
    assert get_checkpoint_conversion_mapping("kind") is None


def test_what_is_registered_cannot_be_changed_through_a_copy():
    register("kind")
    copy = get_checkpoint_conversion_mapping("kind")
    copy[0].rename_source_key("x.a")
    copy[0].scope_prefix = "x"
    copy.clear()
    again = get_checkpoint_conversion_mapping("kind")
    assert scopes(again) == [("a", None, None)]
    assert not again[0].was_used()


def test_the_class_comes_before_its_model_type():
    register("kind", "by_type")
    assert scopes(transforms_of([("", "KindModel", "kind")])) == [("by_type", None, None)]
    register("KindModel", "by_class")
    assert scopes(transforms_of([("", "KindModel", "kind")])) == [("by_class", None, None)]


def test_a_model_that_nobody_registered_has_no_transforms():
    assert transforms_of([("", "Other", "other"), ("inner", "Inner", None)]) == []


@pytest.mark.parametrize("names", [("Part", "part"), ("Part", "other"), ("Other", "part")])
def test_each_of_two_siblings_has_its_own_scope(names):
    register("Part")
    register("part")
    models = [("", "Whole", "whole"), ("encoder", *names), ("decoder", *names)]
    expected = [("a", "encoder", "model"), ("a", "decoder", "model")]
    assert scopes(transforms_of(models, "model")) == expected


def test_the_base_prefix_is_no_part_of_a_scope():
    register("part")
    models = [("", "Whole", "whole"), ("model.tower", "Part", "part")]
    assert scopes(transforms_of(models, "model")) == [("a", "tower", "model")]
    models = [("", "Whole", "whole"), ("model", "Part", "part"), ("modelling", "Part", "part")]
    expected = [("a", "", "model"), ("a", "modelling", "model")]
    assert scopes(transforms_of(models, "model")) == expected


def test_the_transforms_of_an_outer_model_reach_an_inner_one_of_its_kind():
    register("kind")
    models = [("", "KindForX", "kind"), ("model", "KindModel", "kind")]
    assert scopes(transforms_of(models, "model")) == [("a", None, None)]


def test_a_class_does_not_keep_its_model_type_from_inner_models():
    register("KindForX", "by_class")
    register("kind", "by_type")
    models = [("", "KindForX", "kind"), ("model", "KindModel", "kind")]
    expected = [("by_class", None, None), ("by_type", "", "model")]
    assert scopes(transforms_of(models, "model")) == expected


def test_a_key_mapping_keeps_its_order():
    chain = renamings({r"^xx\.": "", "q": "query"})
    assert [t.source_patterns for t in chain] == [[r"^xx\."], ["q"]]
    assert chain[0].rename_source_key("xx.q")[0] == "q"


@pytest.mark.parametrize(
    ("key", "renamed"),
    [
        ("model.sub.old", "model.sub.new"),
        ("sub.old", "sub.new"),
        ("model.sub.x.old", "model.sub.x.old"),
        ("model.subway.old", "model.subway.old"),
        ("model.old", "model.old"),
        ("old", "old"),
    ],
)
def test_an_anchor_stands_at_the_edge_of_the_scope(key, renamed):
    rename = WeightRenaming("^old", "new").scoped("sub", "model")
    assert rename.rename_source_key(key)[0] == renamed
    assert rename.reverse_transform().rename_source_key(renamed)[0] == key


def test_an_empty_scope_is_what_follows_the_base_prefix():
    rename = WeightRenaming("^old", "new").scoped("", "model")
    assert rename.rename_source_key("model.old")[0] == "model.new"
    assert rename.rename_source_key("old")[0] == "new"


def test_a_converter_of_several_to_several_needs_an_operation_for_that():
    with pytest.raises(ValueError, match="one to many, one to one or many to one"):
        WeightConverter(["a", "b"], ["c", "d"], [Chunk()])


def test_a_converter_needs_an_operation():
    with pytest.raises(ValueError, match="at least one operation"):
        WeightConverter("a", "b", [])


def test_operations_are_undone_in_the_opposite_order():
    converter = WeightConverter(["a", "b"], "c", [Concatenate(0), Chunk(1)])
    back = converter.reverse_transform()
    assert [(type(op), op.dim) for op in back.operations] == [(Concatenate, 1), (Chunk, 0)]


def test_a_group_needs_a_target_for_each_source():
    with pytest.raises(ValueError, match="as many targets as sources"):
        GroupWeightRename(["a"], ["b", "c"])


def group():
    return GroupWeightRename(
        [r"(\w+)\.(\d+)\.norm0", r"(\w+)\.(\d+)\.norm1"], [r"\1.\2.norm1", r"\1.\2.norm2"]
    )


def test_a_group_of_two_captures_is_reversed():
    back = group().reverse_transform()
    assert back.rename_source_key("a.3.norm1")[0] == "a.3.norm0"
    assert back.reverse_transform().source_patterns == group().source_patterns


def test_every_capture_of_a_group_is_filled_in():
    rename = group()
    assert rename.rename_source_key("enc.3.norm0.w") == ("enc.3.norm1.w", rename.source_patterns[0])
    assert rename.rename_source_key("enc.3.norm1.w")[0] == "enc.3.norm2.w"


def test_prefixes_are_added_once_and_taken_off_once():
    add, remove = PrefixChange(prefix_to_add="model"), PrefixChange(prefix_to_remove="model")
    assert add.rename_source_key("x.y")[0] == "model.x.y"
    assert add.rename_source_key("model.x.y") == ("model.x.y", None)
    assert remove.rename_source_key("model.model.x")[0] == "model.x"
    assert remove.reverse_transform().rename_source_key("x.y")[0] == "model.x.y"


def test_a_prefix_change_needs_one_prefix():
    with pytest.raises(ValueError, match="only one of"):
        PrefixChange()


def test_an_index_moves_and_moves_back():
    rename = IndexOffsetWeightRename(r"blocks\.(\d+)\.", r"layers.\1.", 2)
    assert rename.rename_source_key("blocks.9.w")[0] == "layers.11.w"
    assert rename.reverse_transform().rename_source_key("layers.11.w")[0] == "blocks.9.w"
    assert rename.copy().offset == 2
