"""When rows end, with a model whose tokens are written down."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from flaxen.generate import generate, stream

A, B, X = 10, 11, 12


def test_a_finished_row_is_padded_and_all_finished_rows_end_the_loop():
    model = tiny.script([5, X, X, X], [A, B, 7, X])
    got = generate(model, [[1], [2]], eos_token_id=[5, 7], pad_token_id=0, max_new_tokens=10)
    np.testing.assert_array_equal(got, [[1, 5, 0, 0], [2, A, B, 7]])


def test_log_probabilities_stop_at_the_end_of_a_row():
    model = tiny.script([5, X, X, X], [A, B, 7, X])
    _, logp = generate(model, [[1], [2]], eos_token_id=[5, 7], return_logprobs=True)
    each = 5 - np.log(np.exp(5) + 15)
    np.testing.assert_allclose(logp, [[each, 0, 0], [each] * 3], rtol=1e-5)


def test_rows_end_one_by_one_never_across_each_other():
    model = tiny.script([A, 8, X, X], [9, B, X, X])
    got = generate(model, [[1], [1]], eos_token_id=8, pad_token_id=0, max_new_tokens=4)
    np.testing.assert_array_equal(got, [[1, A, 8, 0, 0], [1, 9, B, X, X]])


@pytest.mark.parametrize("limit", [1, 5])
def test_a_row_without_end_takes_all_tokens_it_may(limit):
    tokens = stream(tiny.script([A] * 9), [1], eos_token_id=5, max_new_tokens=limit)
    assert len(list(tokens)) == limit
    assert tokens.stats.new_tokens == [limit]
    assert tokens.stats.finish_reason == ["length"]
    assert tokens.stats.prompt_tokens == [1]


def test_an_end_on_the_last_token_counts_as_stop():
    tokens = stream(tiny.script([A, 5, X]), [1], eos_token_id=5, max_new_tokens=2)
    assert [int(t[0]) for t in tokens] == [A, 5]
    assert tokens.stats.finish_reason == ["stop"]


def test_a_stream_says_how_each_row_ended():
    tokens = stream(tiny.script([5, X, X], [A, B, X]), [[1], [2]], eos_token_id=5, max_new_tokens=3)
    np.testing.assert_array_equal(np.stack(list(tokens), 1), [[5, 5, 5], [A, B, X]])
    assert tokens.stats.new_tokens == [1, 3]
    assert tokens.stats.finish_reason == ["stop", "length"]
