"""Greedy tokens against those of Transformers, whatever the padding, the sizes or the mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden import case, cases
from golden_meshes import marked

from flaxen.generate import generate, loop
from flaxen.generate.settings import resolve
from flaxen.models import causal

ONE_MIXTURE = [name for name in cases() if name not in ("qwen2_moe", "qwen3_moe")]


@pytest.mark.parametrize("name", marked(ONE_MIXTURE))
def test_greedy_tokens_are_those_of_transformers(name):
    a = case(name).arrays
    got = generate(tiny.model(name), a["gen_input_ids"], a["gen_attention_mask"], max_new_tokens=16)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, a["gen_sequences"])


LONG, SHORT = tiny.tokens(1, 7)[0], tiny.tokens(1, 3, seed=1)[0]


def padded(length: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Both prompts in a table whose padding holds random ids."""
    ids, mask = tiny.tokens(2, length, seed=length), np.zeros((2, length), int)
    for row, prompt in enumerate((SHORT, LONG)):
        where = {
            "left": np.arange(length - len(prompt), length),
            "right": np.arange(len(prompt)),
            "holes": np.sort(np.random.default_rng(row).permutation(length)[: len(prompt)]),
        }[side]
        ids[row, where], mask[row, where] = prompt, 1
    return ids, mask


@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_each_row_goes_on_as_if_it_were_alone(side, length):
    model, ask = tiny.model("mistral"), {"max_new_tokens": 8, "return_logprobs": True}
    ids, mask = padded(length, side)
    together, logp = generate(model, ids, mask, **ask)
    np.testing.assert_array_equal(together[:, :length], ids)
    for row, prompt in enumerate((SHORT, LONG)):
        alone, its_logp = generate(model, prompt, **ask)
        np.testing.assert_array_equal(together[row, length:], alone[0, len(prompt) :])
        np.testing.assert_allclose(logp[row], its_logp[0], atol=1e-5)


@pytest.mark.parametrize("ask", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 1e-3}])
def test_tokens_are_the_same_where_jax_counts_in_64_bits(ask):
    model = tiny.script([3, 4, 5])
    with jax.enable_x64(True):
        got, logp = generate(model, [1], max_new_tokens=3, return_logprobs=True, **ask)
    assert got.tolist() == [[1, 3, 4, 5]]
    assert (got.dtype, logp.dtype) == (np.int32, np.float32)


def test_lists_and_arrays_of_one_or_two_axes_are_prompts():
    model = tiny.script([3, 4, 5])
    for ids in ([1], [[1]], np.array([1]), jnp.array([[1]])):
        np.testing.assert_array_equal(generate(model, ids, max_new_tokens=2), [[1, 3, 4]])


@pytest.mark.parametrize("capacity, rest", [(16, 0.0), (17, 1e4), (64, np.nan)])
def test_unused_slots_of_a_cache_change_nothing(capacity, rest):
    runtime, decoder = tiny.model().runtime, tiny.model().module
    decoder = dataclasses.replace(decoder, layers=decoder.layers[:1])
    prompt = tiny.tokens(1, 5)
    cache = jax.tree.map(
        lambda x: jnp.full_like(x, rest) if x.ndim == 4 else x, decoder.init_cache(1, capacity)
    )
    sampling = resolve(tiny.model(), 5, {"max_new_tokens": 8}).traced(runtime, logprobs=True)
    valid = np.ones(prompt.shape, bool)
    cache, *scores = loop.prefill(
        decoder, cache, prompt, valid, np.int32(5), capacity=capacity, runtime=runtime
    )
    step = loop.first(*scores, sampling)
    _, tokens, logp, _ = loop.decode(decoder, cache, step, sampling, room=16, runtime=runtime)
    whole = np.concatenate([prompt, tokens[:, :8]], 1)
    logits = causal.forward(decoder, whole, runtime=runtime).logits[:, 4:-1]
    np.testing.assert_array_equal(tokens[:, :8], logits.argmax(-1))
    np.testing.assert_allclose(logp[:, :8], jax.nn.log_softmax(logits).max(-1), atol=1e-5)


def test_equal_seeds_give_equal_samples_and_others_do_not():
    ask = lambda seed: generate(tiny.model(), LONG, max_new_tokens=8, temperature=2.0, seed=seed)
    assert (ask(1) == ask(1)).all()
    assert (ask(1) != ask(2)).any()


def programs() -> int:
    return sum(f._cache_size() for f in (loop.prefill, loop.first, loop.decode, loop.advance))


def test_other_lengths_and_settings_meet_programs_that_are_compiled():
    model = tiny.script([3, 4, 5, 6], vocab=19)
    before = [f._cache_size() for f in (loop.prefill, loop.first, loop.decode)]
    ask = lambda n, **settings: generate(model, np.ones((1, n), int), **settings)
    for n in range(1, 38):
        ask(n, max_new_tokens=5)
    after = [f._cache_size() for f in (loop.prefill, loop.first, loop.decode)]
    assert np.subtract(after, before).tolist() == [3, 1, 3]  # prompts in 16, 32 and 64 slots
    warm = programs()
    for n in (1, 16, 17, 36, 37):
        ask(n, max_new_tokens=16, temperature=0.7, top_p=0.9, seed=n)
        ask(n, max_new_tokens=1, top_k=3, repetition_penalty=1.2, eos_token_id=[3, 4])
    assert programs() == warm


def test_the_cache_is_written_in_place():
    model = tiny.model()
    sampling = resolve(model, 1, {}).traced(model.runtime)
    cache = model.module.init_cache(1, 512)
    step = loop.first(jnp.zeros((1, 128)), jnp.zeros((1, 128), bool), sampling)
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    compiled = loop.advance.lower(model.module, cache, step, sampling, runtime=model.runtime)
    memory = compiled.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size


def test_one_row_can_be_generated_where_neither_rows_nor_heads_divide_by_the_mesh():
    ask = {"max_new_tokens": 4, "return_logprobs": True}
    ids, logp = generate(tiny.model("llama", "fsdp=2,tp=4"), LONG, **ask)
    alone, its_logp = generate(tiny.model(), LONG, **ask)
    np.testing.assert_array_equal(ids, alone)
    np.testing.assert_allclose(logp, its_logp, atol=1e-5)
