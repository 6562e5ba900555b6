"""How a model is run: checked when it is made, printed, and written as data."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from flaxen.attention import AttentionSettings, Blocks, Specs
from flaxen.cache import CacheSettings
from flaxen.core.errors import ConfigError, FlaxenError
from flaxen.layers.runtime import Checkpointing, MLPSettings, Runtime, WeightSettings
from flaxen.shard import PLANS, MeshSpec, Placement, Plan

AXES = ("dp", "fsdp", "tp", "sp")


@st.composite
def specs(draw):
    axes = draw(st.permutations(AXES))
    kinds = st.sampled_from(("none", "one", "two"))
    entries, free = [], list(axes)
    for kind in draw(st.lists(kinds, max_size=2)):
        if kind == "none":
            entries.append(None)
        else:
            count = 1 if kind == "one" else 2
            taken, free = free[:count], free[count:]
            entries.append(taken[0] if kind == "one" else tuple(taken))
    return P(*entries)


sizes = st.integers(1, 4096)
maybe = lambda strategy: st.none() | strategy
attentions = st.builds(
    AttentionSettings,
    mechanism=st.sampled_from(("auto", "vanilla", "blockwise")),
    blocks=st.builds(Blocks, q=sizes, k=sizes, b=sizes, k_major_dkv=maybe(sizes)),
    specs=st.builds(Specs, query=maybe(specs()), generation_bias=maybe(specs())),
    axis=st.sampled_from(AXES),
    scan_ring=st.booleans(),
    backward=st.sampled_from(("triton", "xla")),
)
meshes = st.builds(
    MeshSpec,
    st.permutations([1, -1, 2, 1]).map(tuple),
    st.just(AXES),
    st.sampled_from((None, "cpu")),
)
plans = st.sampled_from((PLANS["auto"], Plan({"heads": "tp", "embed": AXES}, {"batch": AXES})))
runtimes = st.builds(
    Runtime,
    placement=maybe(st.builds(Placement, meshes, plans)),
    attention=attentions,
    mlp=st.builds(MLPSettings, st.booleans(), sizes),
    checkpointing=st.builds(Checkpointing, st.none(), sizes),
    weights=st.builds(
        WeightSettings, bits=st.sampled_from((None, 4, 8)), dtype=st.sampled_from((None, "float16"))
    ),
    constrain_blocks=st.booleans(),
    scan_layers=maybe(st.booleans()),
    purpose=st.sampled_from((None, "train", "serve", "convert")),
)


@settings(max_examples=80, deadline=None)
@given(runtimes)
def test_what_is_written_is_read_back_equal(runtime):
    again = Runtime.from_json(runtime.to_json())
    assert again == runtime
    assert hash(again) == hash(runtime)
    assert again.to_json() == runtime.to_json()


def test_a_mesh_keeps_its_minus_one_and_names_no_platform_of_its_own():
    text = Runtime(placement=Placement(MeshSpec("fsdp=-1,tp=2"), PLANS["auto"])).to_json()
    on = json.loads(text)["placement"]["on"]
    assert on == {"axis_dims": [1, -1, 2, 1], "axis_names": list(AXES), "backend": None}


def test_an_absent_field_has_its_default():
    assert Runtime.from_json("{}") == Runtime()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"placement": {}}', "placement lacks 'on', 'plan'"),
        ('{"placement": {"on": {}, "plan": {}}}', "placement.plan lacks 'weights', 'activations'"),
        ("[]", "expected an object"),
        ('{"atention": {}}', "Did you mean 'attention'"),
        ('{"attention": {"blocks": {"kk": 1}}}', "attention.blocks: 'kk' is unknown"),
        ('{"attention": {"blocks": {"q": "128"}}}', "attention.blocks.q is '128'; expected int"),
        ('{"attention": {"blocks": {"q": true}}}', "attention.blocks.q is True"),
        ('{"attention": {"specs": {"query": "P(None)"}}}', r"attention.specs.query is 'P\(None\)'"),
        ('{"attention": {"specs": {"query": [1]}}}', "expected a mesh axis"),
        ('{"scan_layers": "__import__(\'os\')"}', "scan_layers is"),
    ],
)
def test_data_of_another_kind_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Runtime.from_json(text)


def test_code_is_no_data():
    runtime = Runtime(attention=AttentionSettings(own=(AttentionSettings,)[:0]))
    assert Runtime.from_json(runtime.to_json()) == runtime
    from flaxen.attention import MECHANISMS

    own = dataclasses.replace(MECHANISMS["vanilla"], name="mine")
    runtime = Runtime(attention=AttentionSettings("mine", own=(own,)))
    with pytest.raises(ConfigError, match=r"attention.own.* holds a function"):
        runtime.to_json()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Runtime(attention=AttentionSettings("flahs")), "Unknown attention mechanism"),
        (lambda: Runtime(purpose="trian"), "purpose is 'trian'.*Did you mean 'train'"),
        (lambda: Runtime(scan_layers=1), "scan_layers is 1"),  # type: ignore[arg-type]
        (lambda: Runtime(constrain_blocks="yes"), "constrain_blocks is 'yes'"),  # type: ignore[arg-type]
        (lambda: Runtime(attention=AttentionSettings(axis="ps")), "attention.axis names .* 'ps'"),
        (lambda: Runtime(mlp=5), "mlp is 5; expected MLPSettings"),  # type: ignore[arg-type]
        (lambda: Runtime(cache="int8"), "cache is 'int8'; expected CacheSettings"),  # type: ignore[arg-type]
        (lambda: Runtime(placement="tp=2"), "expected Placement or None"),  # type: ignore[arg-type]
        (lambda: Checkpointing(every=True), "checkpointing.every is True"),
        (lambda: CacheSettings(codec=[]), r"Unknown cache codec \[\]"),  # type: ignore[arg-type]
        (lambda: Blocks(q=0), "attention.blocks.q is 0; .* at least 1"),
        (lambda: Blocks(k_dq=-1), "attention.blocks.k_dq is -1"),
        (lambda: Blocks(b=None), "attention.blocks.b is None"),  # type: ignore[arg-type]
        (lambda: Specs(query=P("tp", "tp")), "uses the mesh axis 'tp' twice"),
        (lambda: Specs(key=P(("dp", "tp"), "tp")), "uses the mesh axis 'tp' twice"),
        (lambda: Specs(key=("tp",)), "expected a PartitionSpec"),  # type: ignore[arg-type]
        (lambda: Specs(key=P(*"abcde")), "expected a PartitionSpec"),
        (lambda: Runtime(attention=AttentionSettings(specs=Specs(bias=P("ttp")))), "'ttp', which"),
        (lambda: AttentionSettings(backward="cuda"), "attention.backward is 'cuda'"),
        (lambda: AttentionSettings(scan_ring=1), "scan_ring is 1"),  # type: ignore[arg-type]
        (lambda: MLPSettings(chunk=0), "mlp.chunk is 0"),
        (lambda: Checkpointing(every=0), "every"),
        (lambda: WeightSettings(bits=3), "weights.bits is 3; expected one of None, 8, 4"),
        (lambda: WeightSettings(bits=True), "weights.bits is True"),
        (lambda: WeightSettings(dtype="bfloat61"), "Did you mean 'bfloat16'"),
        (lambda: WeightSettings(precision="exact"), "weights.precision is 'exact'"),
        (lambda: MeshSpec((1, 2)), "2 sizes and axis_names .* 4 names"),
        (lambda: MeshSpec({"fsd": 2}), "Did you mean 'fsdp'"),
        (lambda: MeshSpec((-1, -1, 1, 1)), "more than one -1"),
        (lambda: MeshSpec((1, 0, 1, 1)), "size 0"),
        (lambda: MeshSpec((1, 2), ("tp", "tp")), "given twice"),
        (lambda: MeshSpec(backend=3), "backend is 3"),  # type: ignore[arg-type]
        (lambda: MeshSpec(backend="gqu").build(), "backend 'gqu' is not here"),
        (lambda: MeshSpec((3, -1, 1, 1)).get_axis_dims(), "multiple of 3 devices, and there are 8"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_name(make, words):
    with pytest.raises(FlaxenError, match=words):
        make()


def test_it_prints_a_line_for_each_difference():
    runtime = Runtime(attention=AttentionSettings(blocks=Blocks(q=64)), scan_layers=True)
    assert repr(Runtime()) == "Runtime()"
    assert repr(runtime).splitlines()[1:-1] == [
        "    attention.blocks.q = 64",
        "    scan_layers = True",
    ]


def test_a_mesh_of_text_a_dict_or_sizes_is_the_same_mesh():
    wanted = MeshSpec((1, 2, -1, 1))
    assert MeshSpec("tp=-1,fsdp=2") == MeshSpec({"tp": -1, "fsdp": 2}) == wanted
    assert wanted.get_axis_dims() == (1, 2, 4, 1)
    assert dict(wanted.build().shape) == {"dp": 1, "fsdp": 2, "tp": 4, "sp": 1}
    assert MeshSpec().get_axis_dims() == (1, 8, 1, 1)
    assert MeshSpec.of("fsdp=2").axis_names == ("fsdp",)


def test_a_mesh_asks_for_devices_of_its_backend_alone_and_puts_nothing_there(monkeypatch):
    import jax

    asked, devices, before = [], jax.devices, len(jax.live_arrays())
    monkeypatch.setattr(jax, "devices", lambda name=None: asked.append(name) or devices(name))
    spec = MeshSpec(backend="cpu")
    placement = Placement(spec, PLANS["auto"])
    assert asked == []
    assert placement.mesh.size == 8
    assert asked == ["cpu"]
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    "purpose, stored, folds", [("train", "float32", False), (None, None, False)]
)
def test_a_purpose_implies_what_nothing_else_says(purpose, stored, folds):
    runtime = Runtime(purpose=purpose)
    assert (runtime.stored, runtime.folds) == (stored, folds)
    assert (
        Runtime(purpose="train", weights=WeightSettings(param_dtype="float16")).stored == "float16"
    )
    assert Runtime(purpose="convert", scan_layers=True).folds
