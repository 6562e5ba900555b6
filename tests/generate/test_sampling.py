"""Which tokens may be drawn, against the sets worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxen.generate.sampling import choose, kept, logprob
from flaxen.generate.settings import resolve
from flaxen.layers.runtime import Runtime

P = [0.5, 0.25, 0.1875, 0.0625]
_kept, _choose = jax.jit(kept), jax.jit(choose)


def sampling(vocab: int = 4, logprobs: bool = False, **settings):
    settings = resolve(tiny.script([0], vocab=vocab), 1, settings)
    return settings.traced(Runtime(), logprobs=logprobs)


def kept_ids(logits, **settings) -> list[int]:
    table = _kept(jnp.asarray([logits], jnp.float32), sampling(len(logits), **settings))
    return np.flatnonzero(table[0]).tolist()


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.4}, [0, 1]),
        ({"top_k": 1, "top_p": 0.8}, [0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 1]),  # of what top-k leaves, the first has 2/3
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"top_k": 10}, [0, 1, 2, 3]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"do_sample": True}, [0, 1, 2, 3]),
    ],
)
def test_the_kept_set_is_exact(settings, expected):
    assert kept_ids(np.log(P), **settings) == expected


def test_the_order_of_the_vocabulary_does_not_matter():
    assert kept_ids(np.log([0.0625, 0.25, 0.5, 0.1875]), top_p=0.8) == [1, 2, 3]


def test_temperature_comes_before_top_p():
    assert kept_ids([3, 2, 1], temperature=0.5, top_p=0.8) == [0]
    assert kept_ids([3, 2, 1], temperature=1.0, top_p=0.8) == [0, 1]


def test_equal_scores_are_cut_where_the_sum_is_reached():
    assert kept_ids([0, 0, 0, 0], top_p=0.5) == [0, 1]


def test_a_large_vocabulary_is_cut_like_a_sorted_one():
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 3
    order = np.argsort(-x)
    p = np.exp(x[order].astype(np.float64))
    nucleus = order[: np.searchsorted(np.cumsum(p / p.sum()), 0.9) + 1]
    assert kept_ids(x, top_p=0.9) == sorted(nucleus)
    assert kept_ids(x, top_k=77) == sorted(order[:77])


def test_draws_follow_the_kept_distribution():
    s = sampling(top_k=2, seed=3)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P)), (4000, 4))
    token = np.asarray(_choose(logits, jnp.zeros(logits.shape, bool), 0, s))
    share = np.bincount(token, minlength=4) / len(token)
    np.testing.assert_allclose(share, [2 / 3, 1 / 3, 0, 0], atol=0.03)


def test_what_was_seen_is_penalised_on_both_sides_of_zero():
    logits = jnp.asarray([[3.0, 2.0, -1.0, -1.9]])
    seen = jnp.asarray([[True, False, True, False]])
    pick = lambda x, penalty: int(_choose(x, seen, 0, sampling(repetition_penalty=penalty))[0])
    assert pick(logits, 1.4) == 0  # 3 / 1.4 = 2.14
    assert pick(logits, 1.6) == 1  # 3 / 1.6 = 1.88
    assert pick(logits - jnp.asarray([[9.0, 9, 0, 0]]), 1.8) == 2  # -1 * 1.8 = -1.8
    assert pick(logits - jnp.asarray([[9.0, 9, 0, 0]]), 2.0) == 3


def test_no_row_ends_before_min_new_tokens():
    s = sampling(eos_token_id=[0, 1], min_new_tokens=2)
    pick = lambda count: int(
        _choose(jnp.log(jnp.asarray([P])), jnp.zeros((1, 4), bool), count, s)[0]
    )
    assert [pick(count) for count in (0, 1, 2)] == [2, 2, 0]


def test_logprobs_are_of_the_models_own_distribution():
    s = sampling(logprobs=True, temperature=0.1)
    got = logprob(jnp.log(jnp.asarray([P])), jnp.asarray([1]), s)
    np.testing.assert_allclose(got, np.log([0.25]), rtol=1e-6)


def test_one_program_serves_all_settings():
    logits, seen = jnp.zeros((1, 4)), jnp.zeros((1, 4), bool)
    _choose(logits, seen, 0, sampling())
    before = _choose._cache_size()
    for settings in ({"temperature": 0.3}, {"top_k": 3, "seed": 5}, {"eos_token_id": [1, 2]}):
        _choose(logits, seen, 0, sampling(**settings))
    assert _choose._cache_size() == before


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-60])
def test_the_coldest_temperatures_are_greedy(temperature):
    """Float32 rounds the last two to 0, by which nothing may be divided."""
    logits, seen = jnp.array([[0.0, 2.0, 1.0, -jnp.inf]]), jnp.zeros((1, 4), bool)
    s = sampling(temperature=temperature, top_k=3, min_p=0.1)
    assert _choose(logits, seen, jnp.int32(0), s).tolist() == [1]
