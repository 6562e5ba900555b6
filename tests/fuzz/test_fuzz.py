"""A few of the damaged checkpoints of `make fuzz`."""

from __future__ import annotations

from fuzz.run import run, table

CASES = 300


def test_a_damaged_checkpoint_loads_or_is_refused_by_one_of_our_errors():
    results = list(run(range(CASES), seed=3))
    assert [r for r in results if r.bad] == [], table(results)
