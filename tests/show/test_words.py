"""Numbers for people."""

from __future__ import annotations

import pytest

from flaxen.show import human_seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 µs"),
        (4.2e-7, "0.42 µs"),
        (4.2e-4, "420 µs"),
        (0.0123456, "12.3 ms"),
        (1.0, "1 s"),
        (59.94, "59.9 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_have_the_unit_that_makes_them_short(seconds: float, words: str):
    assert human_seconds(seconds) == words
