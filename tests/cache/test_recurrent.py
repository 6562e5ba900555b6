"""Models with recurrent layers go on from a cache as if they had read all at once."""

from __future__ import annotations

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import flaxen
from flaxen.cache import Dense, Recurrent
from flaxen.generate import generate


def test_each_layer_has_a_memory_of_its_own_kind():
    hybrid, recurrent = tiny.model("qwen3_next").module, tiny.model("mamba").module
    cache = jax.eval_shape(lambda: hybrid.init_cache(2, 64))
    assert [type(layer) for layer in cache.layers] == [Recurrent] * 3 + [Dense]
    assert not cache.endless
    state = cache.layers[0].state
    assert (state.shape, state.dtype) == ((2, 2, 2, 8, 8), np.float32)
    assert [x.shape for x in cache.layers[0].conv] == [(2, 2, 8, 3)] * 2 + [(2, 2, 2, 8, 3)]
    sixteen = jax.eval_shape(lambda: recurrent.init_cache(2, 4, jnp.bfloat16))
    assert sixteen.endless
    assert (sixteen.layers[0].state.dtype, sixteen.layers[0].conv[0].dtype) == (
        "float32",
        "bfloat16",
    )


@pytest.mark.parametrize("name", ["jamba", pytest.param("mamba", marks=pytest.mark.exhaustive)])
def test_a_saved_cache_is_gone_on_from(name, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path / "model"))
    ids = case.arrays["long_input_ids"]
    first = model(ids[:, :17], past_key_values=model.init_cache(1, 48))
    model.save_cache(first.past_key_values, tmp_path / "cache.safetensors")
    cache = model.load_cache(tmp_path / "cache.safetensors")
    rest = model(ids[:, 17:], past_key_values=cache)
    got = np.concatenate([first.logits, rest.logits], 1)
    np.testing.assert_allclose(got, case.arrays["long_logits"], atol=case.bound)


SHORT, LONG = tiny.tokens(1, 3, seed=1), tiny.tokens(1, 7)


def test_rows_of_other_lengths_and_padding_in_between_do_not_matter():
    model = tiny.model("jamba")
    ids, mask = tiny.tokens(2, 12, seed=5), np.zeros((2, 12), int)
    ids[0, [2, 7, 9]], mask[0, [2, 7, 9]] = SHORT, 1
    ids[1, 3:10], mask[1, 3:10] = LONG, 1
    together = generate(model, ids, mask, max_new_tokens=6)
    for row, prompt in enumerate((SHORT, LONG)):
        alone = generate(model, prompt, max_new_tokens=6)
        np.testing.assert_array_equal(together[row, 12:], alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("name", [pytest.param("lfm2", marks=pytest.mark.exhaustive), "qwen3_next"])
def test_packed_documents_are_as_they_would_be_alone(name, tmp_path):
    model = flaxen.load(golden.write_folder(golden.case(name), tmp_path))
    ids, cuts = tiny.tokens(1, 20), [0, 6, 7, 20]
    segments = np.repeat([[1, 2, 5]], np.diff(cuts), axis=1)
    positions = np.concatenate([np.arange(n) for n in np.diff(cuts)])[None]
    packed = model(ids, None, positions, segment_ids=segments).logits
    for start, stop in ((0, 6), (7, 20)):
        alone = model(ids[:, start:stop]).logits
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=golden.case(name).bound)
