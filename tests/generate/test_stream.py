"""Token by token: the same tokens, and conversations that go on."""

from __future__ import annotations

from importlib import import_module
from itertools import islice

import numpy as np
import pytest
import tiny
from golden import case

from flaxen.core.errors import CacheError
from flaxen.generate import generate, loop, stream

RAGGED = tiny.tokens(2, 7), np.array([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "top_k": 9, "seed": 4}])
def test_a_stream_yields_what_generate_gives(settings):
    whole = generate(tiny.model("mistral"), *RAGGED, max_new_tokens=6, **settings)
    steps = list(stream(tiny.model("mistral"), *RAGGED, max_new_tokens=6, **settings))
    np.testing.assert_array_equal(np.stack(steps, 1), whole[:, 7:])


def test_positions_count_the_tokens_of_each_row():
    tokens = stream(tiny.model("mistral"), *RAGGED, max_new_tokens=6)
    seen = [(next(tokens), np.asarray(tokens._cache.lengths))[1].tolist() for _ in range(5)]
    assert seen == [[3 + i, 7 + i] for i in range(1, 6)]


def continued(*turns: np.ndarray, take: int) -> tuple[list[int], list[int]]:
    """All ids of a conversation up to its last answer; that answer."""
    cache, ids, new = None, [], []
    for turn in turns:
        tokens = stream(tiny.model("mistral"), turn, cache=cache, max_new_tokens=8)
        ids += [*new, *turn.tolist()]
        new = [int(token[0]) for token in islice(tokens, take)]
        cache = tokens.cache
    return ids, new


@pytest.mark.parametrize("take", [8, 3])  # to the end, or broken off
def test_a_conversation_goes_on_as_if_it_were_read_whole(take):
    turns = [tiny.tokens(1, n, seed=n)[0] for n in (5, 3)]
    ids, answer = continued(*turns, take=take)
    whole = generate(tiny.model("mistral"), ids, max_new_tokens=8)[0, len(ids) :]
    assert answer == whole[: len(answer)].tolist()


@pytest.mark.exhaustive
def test_rows_of_other_lengths_go_on_too():
    # The window of this model must not be used up by the padding between two turns.
    model = tiny.model("mistral")
    turns = [RAGGED, (tiny.tokens(2, 4, seed=5), np.array([[0, 0, 0, 1], [1, 1, 1, 1]]))]
    cache, rows = None, [[], []]
    for ids, mask in turns:
        tokens = stream(model, ids, mask, cache=cache, max_new_tokens=6)
        answer = np.stack(list(tokens), 1)
        before = [rows[b] + ids[b][mask[b] == 1].tolist() for b in range(2)]
        rows, cache = [before[b] + answer[b].tolist() for b in range(2)], tokens.cache
    for b in range(2):
        alone = generate(model, before[b], max_new_tokens=6)
        np.testing.assert_array_equal(alone[0, len(before[b]) :], answer[b])


def test_a_cache_grows_and_the_old_one_stays_usable():
    model = tiny.script([3, 4, 5, 6, 7, 8, 9, 10])
    first = stream(model, [1], max_new_tokens=2)
    list(first)
    old = first.cache
    assert old.capacity == 32
    for _ in range(2):
        second = stream(model, [1], cache=old, max_new_tokens=30)
        assert [int(t[0]) for t in second][:3] == [6, 7, 8]
        assert second.cache.capacity == 64
    assert int(old.index) == 3


def test_a_cache_of_other_rows_or_of_another_model_is_refused():
    tokens = stream(tiny.script([3, 4]), [1], max_new_tokens=1)
    with pytest.raises(CacheError, match="1 rows and the input 2"):
        stream(tiny.script([3], [4]), [[1], [1]], cache=tokens.cache)
    with pytest.raises(CacheError, match="another shape"):
        stream(tiny.model(), [1], cache=tokens.cache)


def test_the_next_step_is_on_its_way_before_a_token_is_given(monkeypatch):
    dispatched = []
    real = loop.advance

    def counted(*args, **kw):
        dispatched.append(1)
        return real(*args, **kw)

    monkeypatch.setattr(import_module("flaxen.generate.stream"), "advance", counted)
    tokens = stream(tiny.script([3, 4, 5, 6]), [1], max_new_tokens=3)
    counts = [len(dispatched) for _ in tokens]
    assert counts == [1, 2, 2]  # none after the last


def test_past_a_switch_of_the_rope_every_key_is_another():
    """The longer of two prompts passes it; the other one has ended by then."""
    a, model = case("phi3").arrays, tiny.model("phi3")
    ids, mask = a["gen_input_ids"], a["gen_attention_mask"]
    plain = a["gen_sequences"][:, ids.shape[1] :]
    steps = np.stack(list(stream(model, ids, mask, max_new_tokens=16)), axis=1)
    np.testing.assert_array_equal(steps, plain)
    ended = {"eos_token_id": int(plain[1, 1]), "pad_token_id": 99, "max_new_tokens": 16}
    got = generate(model, ids, mask, **ended)[:, ids.shape[1] :]
    np.testing.assert_array_equal(list(stream(model, ids, mask, **ended)), got.T)
    np.testing.assert_array_equal(got[0], plain[0][: got.shape[1]])
    np.testing.assert_array_equal(got[1, 2:], 99)


def test_a_cache_cannot_pass_a_switch_of_the_rope():
    model = tiny.model("phi3")
    first = stream(model, [[3, 4, 5]], max_new_tokens=2)
    list(first)
    with pytest.raises(CacheError, match="Past 16 tokens"):
        stream(model, [[6]], cache=first.cache, max_new_tokens=20)
