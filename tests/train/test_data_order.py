"""Which rows a step has is the same everywhere and for ever, and mixtures are exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flaxen.train.data.batches import make_batches, rounded
from flaxen.train.data.examples import Example
from flaxen.train.data.order import FINEST, Order, Turns, whole_shares
from flaxen.train.data.rows import RowBatches


def taken(order, steps):
    return [row for step in steps for row in order.rows(step)]


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    order = Order((7, 4), seed=3, size=4)
    epochs = [taken(order, range(e * 3, e * 3 + 3)) for e in range(4)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_seeds_are_no_later_epochs_of_each_other():
    epochs = {
        tuple(taken(Order((9,), seed, 9), [epoch])) for seed in range(5) for epoch in range(5)
    }
    assert len(epochs) == 25


def test_the_order_stays_what_it_was():
    """Runs that are resumed elsewhere stand on it; another version of grain may not change it."""
    assert taken(Order((10,), 0, 5), range(4)) == [
        *[9, 7, 5, 2, 0, 1, 8, 6, 4, 3],
        *[3, 7, 2, 1, 8, 0, 4, 9, 6, 5],
    ]


def test_a_far_step_costs_what_the_first_does():
    order = Order((10**12,), 0, 2)
    assert len(set(order.rows(10**9) + order.rows(3))) == 4


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((3, 1), [3, 1]),
        ((0.7, 0.3), [7, 3]),
        ((50, 25, 25), [2, 1, 1]),
        ((0.1, 0.2, 0.7), [1, 2, 7]),
    ],
)
def test_weights_are_exact(weights, shares):
    assert whole_shares(weights) == shares
    turns = Turns(weights)
    total, parts = sum(shares), [turns[k][0] for k in range(3 * sum(shares))]
    for cycle in range(3):
        assert np.bincount(parts[cycle * total : (cycle + 1) * total]).tolist() == shares
    for k, i in itertools.product(range(1, len(parts) + 1), range(len(shares))):
        assert abs(parts[:k].count(i) - k * shares[i] / total) < 1


def test_thirds_are_as_exact_as_a_millionth():
    shares = whole_shares((1 / 3, 2 / 3))
    assert sum(shares) <= FINEST
    np.testing.assert_allclose(np.divide(shares, sum(shares)), (1 / 3, 2 / 3), atol=1e-6)


def test_each_part_of_a_mixture_goes_round_on_its_own():
    order = Order((2, 30), seed=0, size=4, weights=(3, 1))
    rows = taken(order, range(order.per_epoch))
    assert order.per_epoch == 8
    small = [row for row in rows if row < 2]
    assert len(small) == 24
    assert all(sorted(small[i : i + 2]) == [0, 1] for i in range(0, 24, 2))
    large = [row for row in rows if row >= 2]
    assert len(set(large)) == len(large) == 8


def example(length, token=1):
    ids = np.full(length, token, np.int32)
    return Example(ids, ids)


def test_sources_are_mixed_row_by_row():
    sources = [
        make_batches([example(2, t) for _ in range(5)], seq_len=2, batch_size=8, packing=False)
        for t in (1, 2)
    ]
    mixed = sources[0].mixed(sources[1:], (3, 1))
    for step in range(4):
        assert np.bincount(mixed.batch_at(step)["ids"][..., 0].ravel()).tolist() == [0, 6, 2]
    assert mixed.fingerprint() != sources[0].mixed(sources[1:], (1, 3)).fingerprint()


def test_rows_with_different_fields_are_mixed_too():
    one = np.ones(1, np.int32)
    few = RowBatches([{"ids_0": one}], {"ids_0": np.zeros(2, np.int32)}, 4, 1, 0)
    more = {"ids_0": np.zeros(2, np.int32), "ids_1": np.zeros(2, np.int32)}
    many = RowBatches([{"ids_0": one, "ids_1": one}], more, 4, 1, 0)
    batch = few.mixed([many], (1, 1)).batch_at(0)
    assert (batch["ids_0"][..., 0].sum(), batch["ids_1"][..., 0].sum()) == (4, 2)


def test_rows_of_about_one_length_come_together():
    lengths = np.random.default_rng(0).integers(2, 65, 400)
    examples = [example(n) for n in lengths]
    settings = {"seq_len": 64, "batch_size": 4, "accumulation": 2, "packing": False}
    grouped = make_batches(examples, by_length=True, **settings)
    taken = [grouped.batch_at(step) for step in range(grouped.per_epoch)]
    found = [(b["targets"] != -100).sum(-1).ravel() + 1 for b in taken]
    assert sorted(np.concatenate(found).tolist()) == sorted(lengths.tolist())
    assert max(np.ptp(each) for each in found) <= 4
    widths = [batch["ids"].shape[-1] for batch in taken]
    assert len(set(widths)) <= 8
    assert all(w == rounded(int(each.max()), 64) for w, each in zip(widths, found, strict=True))
    assert widths != sorted(widths) and widths != sorted(widths, reverse=True)
    slots = sum(batch["ids"].size for batch in taken)
    assert slots < 1.2 * lengths.sum() < 0.7 * 400 * 64


def test_grouped_steps_may_be_entered_in_any_order():
    examples = [example(2 + i % 7, i + 1) for i in range(600)]
    settings = {"seq_len": 8, "batch_size": 3, "packing": False, "by_length": True}
    one, other = (make_batches(examples, **settings) for _ in range(2))
    for step in (0, 399, 199, 55, 200, 3):
        np.testing.assert_array_equal(one.batch_at(step)["ids"], other.batch_at(step)["ids"])
    epoch = np.concatenate([one.batch_at(s)["ids"][..., 0].ravel() for s in range(200)])
    assert sorted(epoch.tolist()) == list(range(1, 601))


def test_lengths_are_rounded_to_few():
    assert [rounded(n, 64) for n in (1, 8, 9, 64)] == [8, 8, 16, 64]
    assert [rounded(n, 1000) for n in (1, 129, 999)] == [128, 256, 1000]
    assert {rounded(n, 5) for n in range(1, 6)} == {1, 2, 3, 4, 5}
