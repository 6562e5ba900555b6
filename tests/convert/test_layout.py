"""The layout grammar and the relation, against arrays laid out by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.layout import parse
from flaxen.convert.relation import Join, Under, relate, renamer
from flaxen.core.errors import ConfigError
from flaxen.core.tree import param

QKV = Join(
    "self_attn.qkv_proj",
    "{self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim "
    "| self_attn.v_proj: kv_heads head_dim} embed",
)
D, H, K, HD = 32, 4, 1, 12


def linear(layout, bias=False, **axes):
    weight = {"weight": param(layout, **axes)}
    out = {a: n for a, n in axes.items() if a not in ("embed", "experts")}
    return weight | ({"bias": param(f"({' '.join(out)})", **out)} if bias else {})


def attention(bias=False):
    kv = linear("(kv_heads head_dim) embed", bias, kv_heads=K, head_dim=HD, embed=D)
    q = linear("(heads head_dim) embed", bias, heads=H, head_dim=HD, embed=D)
    return {"self_attn": {"q_proj": q, "k_proj": kv, "v_proj": kv}}


def lazy(arrays):
    return {name: ArrayTensor(array) for name, array in arrays.items()}


def read(tensors):
    return {name: tensor.read() for name, tensor in tensors.items()}


def rows(n, width=D):
    return np.repeat(np.arange(n, dtype=np.float32)[:, None], width, 1)


def assert_reads_back(relation, disk):
    back = read(relation.save(lazy(read(relation.load(lazy(disk))))))
    assert set(back) == set(disk)
    for name, array in disk.items():
        np.testing.assert_array_equal(back[name], array)


def test_fused_qkv_is_cut_by_its_own_head_counts_and_comes_back():
    relation = relate({"layers": [attention(bias=True)]}, {"qkv": QKV, "layers": "model.layers"})
    name = "model.layers.0.self_attn.qkv_proj"
    disk = {f"{name}.weight": rows(72), f"{name}.bias": np.arange(72, dtype=np.float32)}
    assert relation.shapes() == {k: v.shape for k, v in disk.items()}
    ours = read(relation.load(lazy(disk)))
    for piece, first, heads in (("q_proj", 0, 4), ("k_proj", 48, 1), ("v_proj", 60, 1)):
        want = np.arange(first, first + heads * HD).reshape(heads, HD)
        np.testing.assert_array_equal(ours[f"layers.0.self_attn.{piece}.weight"][..., 0], want)
        np.testing.assert_array_equal(ours[f"layers.0.self_attn.{piece}.bias"], want)
    assert_reads_back(relation, disk)


def test_half_the_heads_read_half_the_bytes():
    relation = relate(attention(), {"qkv": QKV})
    source = ArrayTensor(rows(72))
    ours = relation.load({"self_attn.qkv_proj.weight": source})
    half = (slice(2, 4), slice(0, HD), slice(0, D))
    got = ours["self_attn.q_proj.weight"].read(half)
    np.testing.assert_array_equal(got[..., 0].reshape(-1), np.arange(24, 48))
    assert source.counter.total == 24 * D * 4


def test_joined_inside_a_flattened_dimension():
    join = Join("qkv", "(heads {q_proj | k_proj | v_proj} head_dim) embed")
    one = linear("(heads head_dim) embed", heads=2, head_dim=3, embed=4)
    relation = relate({"q_proj": one, "k_proj": one, "v_proj": one}, {"qkv": join})
    disk = {"qkv.weight": rows(18, 4)}
    ours = read(relation.load(lazy(disk)))
    np.testing.assert_array_equal(
        ours["k_proj.weight"][..., 0], disk["qkv.weight"].reshape(2, 3, 3, 4)[:, 1, :, 0]
    )
    assert_reads_back(relation, disk)


def test_a_literal_dimension_belongs_to_the_weight_but_not_to_the_bias():
    join = Join("conv1d", "{a: channels | b: channels} 1 kernel")
    part = {"weight": param(channels=3, kernel=4), "bias": param(channels=3)}
    relation = relate({"a": part, "b": part}, {"conv": join})
    assert relation.shapes() == {"conv1d.weight": (6, 1, 4), "conv1d.bias": (6,)}
    assert_reads_back(
        relation,
        {
            "conv1d.weight": np.arange(24.0).reshape(6, 1, 4),
            "conv1d.bias": np.arange(6.0),
        },
    )


EXPERTS = {"experts": {"up_proj": linear("mlp embed", experts=12, mlp=8, embed=8)}}


def test_twelve_experts_are_stacked_in_the_order_of_their_numbers():
    relation = relate(EXPERTS, {"experts": "experts.{experts}"})
    disk = {f"experts.{i}.up_proj.weight": np.full((8, 8), i, np.float32) for i in range(12)}
    stacked = read(relation.load(lazy(dict(sorted(disk.items())))))["experts.up_proj.weight"]
    assert [stacked[i].min() for i in range(12)] == [stacked[i].max() for i in range(12)]
    assert stacked[:, 0, 0].tolist() == list(range(12))
    assert_reads_back(relation, disk)


def test_the_packed_layout_gives_the_same_experts():
    packed = {"experts": {"up_proj": linear("experts mlp embed", experts=12, mlp=8, embed=8)}}
    relation = relate(packed, {"experts.up_proj.weight": "experts.up_proj"})
    disk = {"experts.up_proj": np.arange(12 * 64, dtype=np.float32).reshape(12, 8, 8)}
    apart = {f"experts.{i}.up_proj.weight": disk["experts.up_proj"][i] for i in range(12)}
    want = read(relate(EXPERTS, {"experts": "experts.{experts}"}).load(lazy(apart)))
    np.testing.assert_array_equal(
        read(relation.load(lazy(disk)))["experts.up_proj.weight"], want["experts.up_proj.weight"]
    )


def test_experts_joined_and_stacked_at_once():
    both = linear("mlp embed", experts=3, mlp=4, embed=5)
    relation = relate(
        {"experts": {"gate_proj": both, "up_proj": both}},
        {
            "gate_up": Join("gate_up_proj", "{gate_proj: mlp | up_proj: mlp} embed"),
            "experts": "experts.{experts}",
        },
    )
    disk = {f"experts.{i}.gate_up_proj.weight": rows(8, 5) + 100 * np.float32(i) for i in range(3)}
    ours = read(relation.load(lazy(disk)))
    assert ours["experts.up_proj.weight"][:, 0, 0].tolist() == [4, 104, 204]
    assert_reads_back(relation, disk)


def test_a_transposed_square_matrix_is_transposed():
    relation = relate({"c_proj": {"weight": param("embed mlp", mlp=6, embed=6)}}, {})
    disk = {"c_proj.weight": np.arange(36.0).reshape(6, 6)}
    np.testing.assert_array_equal(
        read(relation.load(lazy(disk)))["c_proj.weight"], disk["c_proj.weight"].T
    )
    assert_reads_back(relation, disk)


def test_a_name_already_prefixed_gets_no_second_prefix():
    rename = renamer({"layers": "encoder.layers", "norm": "ln_f", "ln_f": "norm", "a.b": "c"})
    assert rename("layers.0.norm.weight") == "encoder.layers.0.ln_f.weight"
    assert rename("ln_f.weight") == "norm.weight"
    assert rename("my_layers.0.norm_2.xnorm") == "my_layers.0.norm_2.xnorm"
    assert rename("a.b.a.bc") == "c.a.bc"
    assert renamer({"norm": "x", "norm.inner": "y"})("norm.inner.norm.w") == "y.x.w"


PIECES = ["layers", "layers.0", "self_attn", "norm", "encoder", "encoder.layers", "x"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_table_leads_back_or_is_refused(data):
    table = data.draw(st.dictionaries(st.sampled_from(PIECES), st.sampled_from(PIECES)))
    leaves = {
        ".".join(data.draw(st.lists(st.sampled_from(["layers", "norm", "x", "0"]), min_size=1)))
        for _ in range(4)
    }
    tree = {leaf: param(embed=2) for leaf in sorted(leaves)}
    try:
        relation = relate(tree, table)
    except ConfigError as error:
        assert "both named" in str(error)
        return
    disk = {name: np.full(2, i, np.float32) for i, name in enumerate(relation.names())}
    assert len(disk) == len(leaves)
    assert_reads_back(relation, disk)


@pytest.mark.parametrize("text", ["(a b", "a) b", "((a b) c)", "{a: x", "(a {b: {c}})"])
def test_unbalanced_layouts_are_refused(text):
    with pytest.raises(ConfigError, match="brackets"):
        parse(text)


def test_two_joined_dimensions_are_refused():
    with pytest.raises(ConfigError, match="more than one"):
        parse("{a: x | b: y} {a: z | b: z}")


def test_a_layout_that_forgets_an_axis_is_refused():
    with pytest.raises(ConfigError, match=r"w has the axes \['mlp', 'embed'\].*places \['mlp'\]"):
        relate({"w": param("mlp", mlp=2, embed=3)}, {})


def test_a_join_with_a_part_missing_is_refused():
    tree = attention()
    del tree["self_attn"]["v_proj"]
    with pytest.raises(ConfigError, match=r"no .*v_proj"):
        relate(tree, {"qkv": QKV})


def test_the_table_tells_where_each_weight_lives():
    table = list(relate(EXPERTS, {"experts": "experts.{experts}"}).table())
    assert len(table) == 1 and len(table[0].names) == 12
    assert table[0].path == "experts.up_proj.weight" and table[0].layout == "mlp embed"
    assert table[0].nbytes == 12 * 64 * 4


def test_many_experts_in_many_layers_relate_in_no_time():
    experts = linear("mlp embed", experts=128, mlp=8, embed=8)
    tree = {"layers": [{"experts": {"a": experts, "b": experts}} for _ in range(64)]}
    start = time.perf_counter()
    relation = relate(tree, {"experts": "experts.{experts}", "layers": "model.layers"})
    disk = ArrayTensor(np.zeros((8, 8), np.float32))
    relation.load(dict.fromkeys(relation.names(), disk))
    assert time.perf_counter() - start < 5


GROUPED = Join(
    "self_attn.query_key_value",
    "(kv_heads {self_attn.q_proj: group | self_attn.k_proj | self_attn.v_proj} head_dim) embed",
)


def grouped(heads, kv_heads):
    """Row r of the file, (kv_heads (group + 2) head_dim) of them, is filled with r."""
    kv = linear("(kv_heads head_dim) embed", True, kv_heads=kv_heads, head_dim=2, embed=3)
    q = linear("(heads head_dim) embed", True, heads=heads, head_dim=2, embed=3)
    model = {"self_attn": {"q_proj": q, "k_proj": kv, "v_proj": kv}}
    relation = relate(model, {"qkv": GROUPED})
    disk = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in relation.shapes().items()
    }
    return relation, disk


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
def test_query_heads_lie_before_the_key_head_that_they_share(heads, kv_heads):
    relation, disk = grouped(heads, kv_heads)
    name, group = "self_attn.query_key_value", heads // kv_heads
    assert disk[f"{name}.weight"].shape == (kv_heads * (group + 2) * 2, 3)
    want = disk[f"{name}.weight"].reshape(kv_heads, group + 2, 2, 3)
    loaded = relation.load(lazy(disk))
    q, k, v = (loaded[f"self_attn.{p}_proj.weight"].read() for p in "qkv")
    np.testing.assert_array_equal(q, want[:, :group].reshape(heads, 2, 3))
    np.testing.assert_array_equal(k, want[:, group])
    np.testing.assert_array_equal(v, want[:, group + 1])
    bias = loaded["self_attn.q_proj.bias"].read()
    wide = disk[f"{name}.bias"].reshape(kv_heads, group + 2, 2)
    np.testing.assert_array_equal(bias, wide[:, :group].reshape(heads, 2))
    assert_reads_back(relation, disk)


def test_a_shard_may_hold_a_part_of_a_group_and_all_of_another():
    relation, disk = grouped(6, 2)
    weight = relation.load(lazy(disk))["self_attn.q_proj.weight"]
    for start, stop in ((0, 2), (2, 4), (1, 6)):
        box = (slice(start, stop), slice(0, 2), slice(1, 3))
        np.testing.assert_array_equal(weight.read(box), weight.read()[box])


def test_names_that_hold_under_a_part_alone():
    names = {
        "layers": "model.layers",
        "norm": "model.norm",
        "eyes.tower": Under("visual", {"layers": "blocks", "qkv": QKV}),
        "eyes.last": Under("", {"norm": "ln"}),
    }
    rename = renamer(names)
    assert rename("layers.0.norm.weight") == "model.layers.0.model.norm.weight"
    assert rename("eyes.tower.layers.0.norm.weight") == "visual.blocks.0.norm.weight"
    assert rename("eyes.last.norm.weight") == "ln.weight"
    relation = relate({"eyes": {"tower": {"layers": [attention()]}}}, names)
    assert relation.names() == ["visual.blocks.0.self_attn.qkv_proj.weight"]
