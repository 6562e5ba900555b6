from __future__ import annotations

import json
from pathlib import Path

import pytest

from flaxen.convert.ops import Chunk, ErnieFuseAndSplitTextVisionExperts, IdentityOp
from flaxen.convert.transforms import (
    GlobAlternation,
    GroupWeightRename,
    LayerPairCollapse,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    natural_key,
    register_checkpoint_conversion_mapping,
)
from flaxen.convert.transforms.pattern import target_text
from flaxen.core.errors import ConfigError

DATA = Path(__file__).parent.parent / "data" / "unit"
CASES = json.loads((DATA / "transforms.json").read_text())
MAPPING = json.loads((DATA / "mapping_reversed.json").read_text())

CLASSES = {
    cls.__name__: cls
    for cls in (WeightRenaming, GroupWeightRename, PrefixChange, LayerPairCollapse, WeightConverter)
}
OPS = {
    "Chunk(dim=0)": IdentityOp,
    "ErnieFuseAndSplitTextVisionExperts": ErnieFuseAndSplitTextVisionExperts,
}

TORN = r"^layers\.(\d+)\.(?!(?:mtp_block|enorm|hnorm|eh_proj|post_norm)\.)"
"""A source whose look-around has a group inside; the reference leaves the end of it in the name."""


def make(case):
    arguments = dict(case["args"])
    if "operations" in arguments:
        arguments["operations"] = [OPS[name]() for name in arguments["operations"]]
    transform = CLASSES[case["cls"]](**arguments)
    transform.scope_prefix = case["scope_prefix"]
    transform.base_model_prefix = case["base_model_prefix"]
    return transform


def check(transform, case):
    assert transform.source_patterns == case["source_patterns"]
    assert transform.target_patterns == case["target_patterns"]
    keys = [key for key, _, _ in case["results"]]
    assert [[key, *transform.rename_source_key(key)] for key in keys] == case["results"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "init_error" not in c], ids=lambda c: f"{c['cls']}-{c['args']}"
)
def test_transforms_rename_as_the_reference_does(case):
    transform = make(case)
    check(transform, case)
    assert transform.was_used() == case["was_used"]
    back = make(case).reverse_transform()
    assert type(back).__name__ == case["reverse"]["cls"]
    check(back, case["reverse"])


@pytest.mark.parametrize("case", [c for c in CASES if "init_error" in c], ids=lambda c: c["cls"])
def test_what_cannot_be_a_transform_is_refused(case):
    kind, text = case["init_error"].split(": ", 1)
    assert kind == "ValueError"
    with pytest.raises(ValueError) as error:
        make(case | {"scope_prefix": None, "base_model_prefix": None})
    # The reference prints a set in the middle.
    assert str(error.value)[:60] == text[:60]


def made_again(case):
    if case["cls"] == "WeightConverter":
        ernie = [ErnieFuseAndSplitTextVisionExperts()]
        return WeightConverter(case["src"], case["tgt0"], ernie)
    return CLASSES[case["cls"]](case["src"], case["tgt0"])


def test_every_transform_of_the_reference_mapping_is_read_and_reversed_alike():
    cases = [case for some in MAPPING.values() for case in some]
    count = 0
    for case in cases:
        # These two are made from prefixes, or from nothing; the cases above have them.
        if case["cls"] in ("PrefixChange", "LayerPairCollapse") or case["src"] == [TORN]:
            continue
        transform, count = made_again(case), count + 1
        assert (transform.source_patterns, transform.target_patterns) == (case["src"], case["tgt"])
        back = transform.reverse_transform()
        assert back.source_patterns == case["reverse"]["src"]
        assert back.target_patterns == case["reverse"]["tgt"]
    assert count == 550


def test_a_look_around_with_groups_is_dropped_whole():
    assert target_text(TORN) == (r"layers.\1.", r"(\d+)")


def test_prefix_changes_of_the_reference_mapping_are_made_of_the_same_patterns():
    change = PrefixChange(prefix_to_remove="mtp")
    assert (change.source_patterns, change.target_patterns) == ([r"^mtp\.(.+)"], [r"\1"])
    assert change.reverse_transform().source_patterns == [r"^(?:(?!mtp\.))(.+)"]


def test_keys_sort_as_one_counts():
    case = json.loads((DATA / "natural_sort.json").read_text())
    assert sorted(case["keys"], key=natural_key) == case["sorted"]


def test_a_number_of_ten_thousand_digits_sorts_too():
    long = "9" * 10_000
    assert sorted([f"a.{long}", "a.10", f"a.x{long}"], key=natural_key)[0] == "a.10"


def test_the_text_is_replaced_where_it_matched():
    rename = WeightRenaming(r"(?<!model\.)stages", "model.stages")
    key = "model.stages.0.stages.w"
    assert rename.rename_source_key(key)[0] == "model.stages.0.model.stages.w"


@pytest.mark.parametrize("pattern", ["a(", "*.w(", "[z"])
def test_a_pattern_that_is_no_regular_expression_is_named(pattern):
    with pytest.raises(ValueError, match="source pattern"):
        WeightRenaming(pattern, "b")


def test_a_back_reference_needs_a_group():
    with pytest.raises(ValueError, match=r"no capturing groups found in target_patterns"):
        WeightRenaming(r"a.\1", "b")


def test_patterns_are_written_once():
    rename = WeightRenaming("a", "b")
    with pytest.raises(ValueError, match="Cannot assign to field source_patterns"):
        rename.source_patterns = ["c"]
    with pytest.raises(ValueError, match="Cannot assign to field target_patterns"):
        rename.target_patterns = ["c"]


def test_reversing_twice_gives_the_transform_itself():
    rename = WeightRenaming(r"^model(?!\.visual)\.(\d+)\.x", r"language.\1.y")
    again = rename.reverse_transform().reverse_transform()
    assert again.source_patterns == rename.source_patterns
    assert again.target_patterns == rename.target_patterns


@pytest.mark.parametrize(
    ("globs", "name", "found"),
    [
        (["model.norm.weight"], "model.norm.weight", "model.norm.weight"),
        (["layers.*.norm"], "model.layers.12.norm.weight", "layers.*.norm"),
        (["layers.*.norm"], "layers.first.norm", "layers.*.norm"),
        (["layers.*.norm"], "layers.norm", None),
        (["layers.*.mlp.*", "layers.0.mlp.up"], "layers.0.mlp.up", "layers.*.mlp.*"),
        (["layers.0.mlp.up", "layers.*.mlp.*"], "layers.0.mlp.up", "layers.0.mlp.up"),
        (["layers.*.mlp.up", "layers.*.mlp.down"], "layers.3.mlp.down", "layers.*.mlp.down"),
        (["a.b"], "axb", None),
        ([], "a", None),
        ([f"layers.{i}.norm" for i in range(200)], "layers.199.norm", "layers.199.norm"),
    ],
)
def test_the_first_listed_glob_that_matches(globs, name, found):
    assert GlobAlternation(globs).match(name) == found


@pytest.mark.parametrize("patterns", [[], None, ["a", 3]])
def test_a_transform_without_patterns_is_refused(patterns):
    with pytest.raises(ConfigError, match="takes a pattern"):
        WeightRenaming(patterns, "b")
    with pytest.raises(ConfigError, match="takes a pattern"):
        WeightRenaming("a", patterns)


def test_groups_with_names_count_as_groups():
    rename = WeightRenaming(r"h(?P<n>\d+)", r"layers.\1")
    assert rename.rename_source_key("h7.w")[0] == "layers.7.w"
    assert rename.reverse_transform().rename_source_key("layers.7.w")[0] == "h7.w"


@pytest.mark.parametrize("patterns", ["(?P<g0>a)", "(?i)a", ["(?P<n>a)", "(?P<n>b)"]])
def test_patterns_that_cannot_stand_together_are_refused(patterns):
    with pytest.raises(ConfigError, match="source pattern"):
        WeightRenaming(patterns, "b")


@pytest.mark.parametrize("operations", [None, [Chunk], ["Chunk"]])
def test_a_converter_takes_operations_only(operations):
    with pytest.raises(ConfigError, match="operation"):
        WeightConverter("a", "b", operations)


@pytest.mark.parametrize("transforms", [None, ["a"], {"a": "b"}, WeightRenaming("a", "b")])
def test_only_lists_of_transforms_are_registered(transforms):
    with pytest.raises(ConfigError, match="list of transforms"):
        register_checkpoint_conversion_mapping("never", transforms)
