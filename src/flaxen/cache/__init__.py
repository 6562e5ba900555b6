"""What decoding remembers: layouts of keys and values."""

from flaxen.cache.dense import Cache, Dense, room_for

__all__ = ["Cache", "Dense", "room_for"]
