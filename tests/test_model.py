"""The public contract of a Model."""

from __future__ import annotations

import dataclasses
import json

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxen
from flaxen.core.errors import CacheError, CheckpointError, ConfigError, FlaxenError, InputError
from flaxen.core.tree import Param
from flaxen.layers.norm import OffsetRMSNorm, RMSNorm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    return flaxen.load(folder)


IDS = np.arange(1, 9, dtype=np.int32)[None]


def test_it_is_a_pytree_that_jit_grad_and_map_work_on(model):
    doubled = jax.tree.map(lambda x: 2 * x, model)
    assert isinstance(doubled, flaxen.Model)
    logits = jax.jit(lambda m, ids: m(ids).logits)(model, IDS)
    np.testing.assert_allclose(logits, model(IDS).logits, atol=1e-5)
    grads = jax.grad(lambda m: m(IDS, labels=IDS).loss)(model)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    assert 0 < norm < jnp.inf


def test_two_loads_of_one_checkpoint_have_the_same_structure(folder, model):
    again = flaxen.load(folder)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model, again)
    assert all(jax.tree.leaves(same))


def test_abstract_reads_no_weight(folder):
    abstract = flaxen.load(folder, abstract=True)
    assert all(isinstance(x, Param) for x in jax.tree.leaves(abstract))
    assert abstract.num_parameters == flaxen.load(folder).num_parameters
    assert abstract.loading.bytes_read == 0
    shape = jax.eval_shape(lambda m: m(IDS).logits, abstract)
    assert shape.shape == (1, 8, 128)


def test_an_abstract_model_cannot_be_saved(folder, tmp_path):
    with pytest.raises(CheckpointError, match="abstract"):
        flaxen.load(folder, abstract=True).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dtype_converts_weights_and_results(folder):
    low = flaxen.load(folder, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.bfloat16.dtype}
    assert low(IDS).logits.dtype == jnp.bfloat16
    assert low.config.dtype in ("bfloat16", jnp.bfloat16)


def test_a_float32_model_is_float32_throughout(model):
    jaxpr = jax.make_jaxpr(lambda m: m(IDS).logits)(model)
    assert "bf16" not in str(jaxpr)
    assert "f64" not in str(jaxpr)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.int64])
def test_masks_of_any_kind(model, dtype):
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 1]], dtype)
    alone = model(IDS[:, 2:]).logits
    np.testing.assert_allclose(model(IDS, mask).logits[:, 2:], alone, atol=1e-5)


def test_padding_ids_do_not_matter(model):
    mask = np.array([[0, 0, 1, 1, 1, 1, 0, 0]])
    other = np.where(mask == 1, IDS, 77)
    np.testing.assert_array_equal(
        model(IDS, mask).logits[:, 2:6], model(other, mask).logits[:, 2:6]
    )


def test_packed_documents_equal_documents_alone(model):
    packed = model(IDS, segment_ids=np.array([[0, 0, 0, 1, 1, 1, 1, 1]])).logits
    np.testing.assert_allclose(packed[:, :3], model(IDS[:, :3]).logits, atol=1e-5)
    np.testing.assert_allclose(packed[:, 3:], model(IDS[:, 3:]).logits, atol=1e-5)


def test_restarting_positions_mean_packed_documents(model):
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = model(IDS, position_ids=positions).logits
    np.testing.assert_allclose(packed[:, 3:], model(IDS[:, 3:]).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([1, 2, 3], "shape \\(batch, length\\)"),
        ([[1.0, 2.0]], "whole numbers"),
        ([[]], "whole numbers"),
        ([[1, 128]], "vocabulary has 0 to 127"),
        ([[-1, 3]], "vocabulary has 0 to 127"),
    ],
)
def test_bad_ids_say_what_is_wrong(model, ids, reason):
    with pytest.raises(InputError, match=reason):
        model(ids)


def test_a_mask_of_another_shape_is_refused(model):
    with pytest.raises(InputError, match=r"attention_mask has shape \(1, 7\)"):
        model(IDS, IDS[:, :7])


def test_a_cache_step_by_step_equals_the_whole(model):
    cache, steps = model.init_cache(1, 8), []
    for t in range(8):
        out = model(IDS[:, t : t + 1], past_key_values=cache)
        cache = out.past_key_values
        steps.append(out.logits)
    np.testing.assert_allclose(np.concatenate(steps, 1), model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("garbage", [1e4, np.nan])
@pytest.mark.parametrize("capacity", [8, 17, 64])
def test_unused_cache_slots_change_nothing(model, capacity, garbage):
    cache = model.init_cache(1, capacity)
    dirty = jax.tree.map(lambda x: jnp.full_like(x, garbage), cache.layers)
    cache = type(cache)(layers=dirty, index=cache.index, keep=cache.keep, lengths=cache.lengths)
    logits = model(IDS, past_key_values=cache).logits
    np.testing.assert_allclose(logits, model(IDS).logits, atol=1e-5)


def test_a_full_cache_is_an_error_and_can_grow(model):
    cache = model(IDS, past_key_values=model.init_cache(1, 8)).past_key_values
    with pytest.raises(CacheError, match="8 slots, 8 are used and 1 more"):
        model(IDS[:, :1], past_key_values=cache)
    out = model(IDS[:, :1], past_key_values=cache.grown(9))
    whole = model(np.concatenate([IDS, IDS[:, :1]], 1)).logits
    np.testing.assert_allclose(out.logits[:, -1], whole[:, -1], atol=1e-5)


def test_overflow_in_compiled_code_is_nan_never_a_shift(model):
    step = jax.jit(lambda m, c: m(IDS, past_key_values=c).logits)
    full = model(IDS, past_key_values=model.init_cache(1, 8)).past_key_values
    assert np.isnan(step(model, full)).all()


@pytest.mark.parametrize(
    "more",
    [
        {"labels": IDS},
        {"segment_ids": IDS},
        {"output_attentions": True},
        {"output_hidden_states": True},
    ],
)
def test_what_a_cache_cannot_take_is_refused_not_dropped(model, more):
    with pytest.raises(InputError, match=f"{next(iter(more))} cannot be used"):
        model(IDS, past_key_values=model.init_cache(1, 8), **more)


def test_a_cache_that_does_not_fit_is_refused(model):
    with pytest.raises(CacheError, match="2 rows and the input 1"):
        model(IDS, past_key_values=model.init_cache(2, 8))
    with pytest.raises(CacheError, match="tuple is no cache"):
        model(IDS, past_key_values=())
    other = model.replace(module=dataclasses.replace(model.module, layers=model.module.layers[:1]))
    with pytest.raises(CacheError, match="another shape"):
        model(IDS, past_key_values=other.init_cache(1, 8))
    with pytest.raises(CacheError, match="0 slots"):
        model.init_cache(1, 0)


@pytest.mark.parametrize("label", [-1, 10**6])
def test_labels_outside_the_vocabulary_are_refused(model, label):
    with pytest.raises(InputError, match=f"labels hold {label}"):
        model(IDS, labels=np.full_like(IDS, label))


def test_positions_are_whole_numbers(model):
    with pytest.raises(InputError, match="position_ids is float64"):
        model(IDS, position_ids=IDS * 0.5)


def test_an_abstract_model_cannot_run(folder):
    with pytest.raises(InputError, match="abstract"):
        flaxen.load(folder, abstract=True)(IDS)


def test_key_heads_are_stored_once(model):
    assert model.init_cache(3, 20).layers[0].k.shape == (3, 2, 20, 16)


def test_remat_changes_no_number(folder, model):
    again = flaxen.load(folder, remat=True)
    grads = [jax.grad(lambda m: m(IDS, labels=IDS).loss)(m) for m in (model, again)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_contradictory_generation_config_comes_back_as_it_was(tmp_path):
    source = golden.write_folder(golden.case("llama"), tmp_path / "source")
    said = '{"do_sample": false, "temperature": 1e-06, "top_p": null}'
    (source / "generation_config.json").write_text(said)
    model = flaxen.load(source)
    model.save(tmp_path / "out")
    saved = (tmp_path / "out" / "generation_config.json").read_text()
    assert json.loads(saved) == json.loads(said) == model.generation_config


def test_a_tokenizer_is_written_before_the_folder_is_swapped_in(model, tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")
            if (tmp_path / "out").exists():
                raise RuntimeError("stop")

    model.save(tmp_path / "out", tokenizer=Tokenizer())
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert before["tokenizer.json"] == b"{}"
    with pytest.raises(RuntimeError, match="stop"):
        model.save(tmp_path / "out", dtype="bfloat16", tokenizer=Tokenizer())
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_an_unknown_dtype_offers_the_nearest(folder):
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        flaxen.load(folder, dtype="bfloat61")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dtype": object()}, "Unknown dtype"),
        ({"attention": "vanila"}, "Did you mean 'vanilla'"),
        ({"mesh": 7}, "7 is no mesh"),
        ({"key_mapping": {"(": "x"}}, r"key_mapping: .*'\('"),
        ({"key_mapping": {"model": r"\9"}}, r"key_mapping: .*more than"),
    ],
)
def test_options_that_make_no_sense_are_refused_while_loading(folder, options, words):
    with pytest.raises(FlaxenError, match=words):
        flaxen.load(folder, abstract=True, **options)


def test_key_mapping_renames_keys_first(folder, tmp_path, model):
    case = golden.case("llama")
    odd = {f"xx.{k}": v for k, v in case.weights.items()}
    golden.write_folder(golden.Case("odd", case.about, case.arrays, odd), tmp_path)
    mapped = flaxen.load(tmp_path, key_mapping={r"^xx\.": ""})
    np.testing.assert_array_equal(mapped(IDS).logits, model(IDS).logits)


def test_norms_round_in_the_order_of_their_family():
    """Llama casts to bfloat16 before the weight, Gemma multiplies by 1 + weight in float32."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3072)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal(3072) * 0.3, jnp.bfloat16)
    h = x.astype(jnp.float32)
    unit = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    llama = RMSNorm(weight=w, eps=1e-6)(x)
    gemma = OffsetRMSNorm(weight=w, eps=1e-6)(x)
    assert (llama == unit.astype(jnp.bfloat16) * w).all()
    assert (gemma == (unit * (1 + w.astype(jnp.float32))).astype(jnp.bfloat16)).all()


def test_fresh_weights_do_not_depend_on_the_mesh():
    from flaxen.pretrained import from_config

    config = golden.case("llama").config
    one, many = from_config(config, seed=3), from_config(config, seed=3, mesh="fsdp=4,tp=2")
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(
        jax.tree.leaves(one)[0], jax.tree.leaves(from_config(config, seed=4))[0]
    )


def test_positions_go_on_where_each_row_ended(model):
    """Rows of three and seven real tokens count on with 3, 4, ... and 7, 8, ..."""
    mask = np.array([[0, 0, 0, 0, 1, 1, 1], [1] * 7], bool)
    cache = model.init_cache(2, 12)
    out = model(np.repeat(IDS[:, :7], 2, 0), mask, past_key_values=cache)
    next_positions = [out.past_key_values.lengths.tolist()]
    for _ in range(2):
        out = model(np.array([[5], [6]]), past_key_values=out.past_key_values)
        next_positions.append(out.past_key_values.lengths.tolist())
    assert next_positions == [[3, 7], [4, 8], [5, 9]]
