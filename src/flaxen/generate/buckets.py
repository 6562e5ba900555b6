"""A few sizes instead of any, so that other lengths meet a program that is compiled already."""

from __future__ import annotations

BUCKETS = (16, 32, 64, 128, 256, 512)


def bucket(length: int) -> int:
    """The next of 16, 32, 64, 128, 256, 512, 1024, 1536, ..."""
    return next((b for b in BUCKETS if length <= b), -(-length // BUCKETS[-1]) * BUCKETS[-1])
