"""A prompt's cache on disk, and caches that are too large for this machine."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

import flaxen
from flaxen.cache import CacheSettings, room_for
from flaxen.core.errors import CacheError
from flaxen.core.tree import paths


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return golden.write_folder(golden.case("gemma3_text"), tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def model(folder):
    return flaxen.load(folder)


def laid(model, settings: CacheSettings):
    return model.replace(runtime=dataclasses.replace(model.runtime, cache=settings))


def filled(cache):
    """With other bits in every place."""
    draw = np.random.default_rng(0)

    def fill(x):
        new = draw.integers(0, 100, x.shape)
        return jax.device_put(np.asarray(new).astype(x.dtype), x.sharding)

    return jax.tree.map(fill, cache)


@pytest.mark.parametrize(
    "settings",
    [
        CacheSettings(),
        CacheSettings(layout="dense", codec="int4"),
        CacheSettings(layout="paged", codec="int8", page_size=8),
        CacheSettings(layout="ring", codec="fp8"),
    ],
    ids=str,
)
def test_a_cache_comes_back_bit_by_bit_whatever_the_model_is_set_to(model, settings, tmp_path):
    cache = filled(laid(model, settings).init_cache(2, 24, jnp.bfloat16))
    model.save_cache(cache, tmp_path / "prompt.safetensors")
    back = model.load_cache(tmp_path / "prompt.safetensors")
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    for a, b in zip(*map(jax.tree.leaves, (back, cache)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert [x.name for x in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_a_cache_moves_to_another_mesh(folder, model, tmp_path):
    cut = flaxen.load(folder, mesh="sp=4", cache="int8")
    cache = filled(cut.init_cache(1, 64))
    assert cache.layers[1].k.codes.sharding.spec == PartitionSpec(None, None, "sp", None)
    cut.save_cache(cache, tmp_path / "prompt")
    for back in (model.load_cache(tmp_path / "prompt"), cut.load_cache(tmp_path / "prompt")):
        for a, b in zip(*map(jax.tree.leaves, (back, cache)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert back.layers[1].k.codes.sharding == cache.layers[1].k.codes.sharding


def test_a_prompt_with_pictures_keeps_how_these_count(model, tmp_path):
    cache = model.init_cache(2, 8).shifted(np.array([3, -2], np.int32))
    model.save_cache(cache, tmp_path / "prompt")
    np.testing.assert_array_equal(model.load_cache(tmp_path / "prompt").shift, [3, -2])


def test_another_models_cache_is_refused(model, tmp_path):
    model.save_cache(model.init_cache(1, 8), tmp_path / "prompt")
    norm = dataclasses.replace(model.module.norm, weight=model.module.norm.weight + 1)
    other = model.replace(module=dataclasses.replace(model.module, norm=norm))
    with pytest.raises(CacheError, match="other weights"):
        other.load_cache(tmp_path / "prompt")


def test_a_cache_of_another_shape_is_refused(model, tmp_path):
    from flaxen.cache import load, stored

    model.save_cache(model.init_cache(1, 8), tmp_path / "prompt")
    name = stored(tmp_path / "prompt").model
    with pytest.raises(CacheError, match=r"bool\[1, 8\], and bool\[1, 9\] is asked for"):
        load(tmp_path / "prompt", model.module.cache_shapes(1, 9, runtime=model.runtime), name)


def test_a_file_that_is_no_cache_is_refused(model, folder):
    with pytest.raises(CacheError, match="no saved cache"):
        model.load_cache(folder / "model.safetensors")


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": "2"},
        {"batch": 1.5},
        {"length": None},
        {"length": -1},
        {"dtype": "foo"},
        {"dtype": "int32"},
        {"codec": ["int8"]},
        {"layout": "foo"},
        {"page_size": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused(wrong, tmp_path):
    from flaxen.cache import stored

    sense = {"model": "", "batch": 2, "length": 9, "dtype": "float32", "layout": "dense"}
    sense |= {"codec": None, "page_size": 16}
    for about in (sense, sense | wrong):
        header = json.dumps({"__metadata__": {"flaxen_cache": json.dumps(about)}}).encode()
        (tmp_path / "prompt").write_bytes(len(header).to_bytes(8, "little") + header)
        if about is sense:
            assert stored(tmp_path / "prompt").batch == 2
    with pytest.raises(CacheError, match="no saved cache"):
        stored(tmp_path / "prompt")


def test_only_caches_can_be_saved(model, tmp_path):
    with pytest.raises(CacheError, match="NoneType is no cache"):
        model.save_cache(None, tmp_path / "prompt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["dense", "ring", "paged"])
def test_a_cache_larger_than_memory_is_refused_before_it_is_made(model, layout):
    with pytest.raises(CacheError, match=r"takes [\d,]{15,} bytes, and [\d,]{9,} are available"):
        laid(model, CacheSettings(layout=layout)).init_cache(1000, 10**9)


def test_pages_are_for_what_is_asked(model):
    cache = laid(model, CacheSettings(layout="paged", page_size=16)).init_cache(3, 40)
    assert cache.pages.count == 3 * 3
    assert cache.layers[0].k.shape == (9, 2, 16, 16)


def test_shapes_need_no_weights(folder):
    abstract = flaxen.load(folder, abstract=True)
    shapes = abstract.module.cache_shapes(2, 16)
    assert {type(x) for x in paths(shapes).values()} == {jax.ShapeDtypeStruct}


def test_the_cache_is_described_when_loading(folder):
    model = flaxen.load(folder, cache="int8")
    assert model.runtime.cache == CacheSettings(codec="int8")
    paged = flaxen.load(folder, cache=CacheSettings(layout="paged"))
    assert paged.init_cache(1, 8).pages is not None


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_a_full_cache_says_what_is_stored_asked_and_available(layout):
    module = tiny.model("llama").module
    runtime = dataclasses.replace(tiny.model("llama").runtime, cache=CacheSettings(layout=layout))
    cache = module.init_cache(2, 8, runtime=runtime)
    cache = dataclasses.replace(cache, index=jnp.int32(6), lengths=jnp.array([3, 6], jnp.int32))
    room_for(cache, np.ones((2, 2), bool))
    with pytest.raises(CacheError, match="8 slots, 6 are used and 3 more"):
        room_for(cache, np.ones((2, 3), bool))
    # Padding needs no page.
    padded = np.array([[True] * 3, [True, True, False]])
    if layout == "paged":
        room_for(cache, padded)


def test_a_window_model_never_runs_out(model):
    module = tiny.model("mistral").module
    cache = module.init_cache(1, 64)
    assert cache.endless
    room_for(dataclasses.replace(cache, index=jnp.int32(64)), np.ones((1, 5), bool))
    assert not model.init_cache(1, 64).endless


def test_generating_more_than_fits_into_memory_is_refused_before_it_begins(model, monkeypatch):
    monkeypatch.setattr(import_module("flaxen.cache.empty"), "host_memory", lambda: 1000)
    with pytest.raises(CacheError, match="are available"):
        model.generate([[1, 2, 3]], max_new_tokens=4)
