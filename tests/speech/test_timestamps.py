"""Timestamps: the rule against Transformers', and where windows are cut."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.speech.timestamps import Piece, pieces, rule

BEGIN, END, V = 20, 15, 32


def theirs(logits, rows, latest):
    """What Transformers' rule does, spelled out: its class needs torch."""
    out = logits.copy()
    out[:, BEGIN - 1] = -np.inf
    for row, said in zip(out, rows, strict=True):
        last = len(said) >= 1 and said[-1] >= BEGIN
        before = len(said) < 2 or said[-2] >= BEGIN
        if last and before:
            row[BEGIN:] = -np.inf
        elif last:
            row[:END] = -np.inf
        times = [t for t in said if t >= BEGIN]
        if times:
            row[BEGIN : times[-1] + (0 if last and not before else 1)] = -np.inf
        if not said:
            row[:BEGIN] = -np.inf
            row[BEGIN + latest + 1 :] = -np.inf
        chances = np.exp(row - row.max())
        if chances[BEGIN:].sum() > chances[:BEGIN].max():
            row[:BEGIN] = -np.inf
    return out


@pytest.mark.parametrize(
    "rows",
    [
        [[], []],
        [[20], [23]],
        [[20, 3], [20, 21]],
        [[20, 3, 24], [20, 3, 4]],
        [[20, 3, 24, 24], [20, 3, 24, 15]],
        [[20, 3, 24, 24, 5], [20, 3, 24, 26, 6]],
    ],
    ids=len,
)
def test_what_may_follow(rows):
    rng = np.random.default_rng(len(rows[0]))
    logits = rng.normal(0, 2, (2, V)).astype(np.float32)
    tokens = np.full((2, 8), END, np.int32)
    for i, said in enumerate(rows):
        tokens[i, : len(said)] = said
    got = rule(BEGIN, END, 3)(jnp.asarray(logits), jnp.asarray(tokens), jnp.int32(len(rows[0])))
    want = theirs(logits, rows, 3)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize(
    ("tokens", "found", "moved"),
    [
        ([], [], 30.0),
        ([3, 4], [Piece(0.0, 30.0, [3, 4])], 30.0),
        # A closed end: nothing is said after it.
        ([20, 3, 25], [Piece(0.0, 0.1, [20, 3, 25])], 30.0),
        (
            [20, 3, 22, 22, 4, 25],
            [Piece(0.0, 0.04, [20, 3, 22]), Piece(0.04, 0.1, [22, 4, 25])],
            30.0,
        ),
        # An open one: what was begun is heard again.
        ([20, 3, 22, 22, 4], [Piece(0.0, 0.04, [20, 3, 22])], 0.04),
        ([20, 3, 22, 22], [Piece(0.0, 0.04, [20, 3, 22])], 0.04),
    ],
)
def test_where_windows_are_cut(tokens, found, moved):
    got, seconds = pieces(tokens, BEGIN, 30.0)
    assert seconds == pytest.approx(moved) and len(got) == len(found)
    for one, other in zip(got, found, strict=True):
        assert one.tokens == other.tokens
        assert (one.start, one.end) == (pytest.approx(other.start), pytest.approx(other.end))
