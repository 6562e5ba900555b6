"""What decoding remembers: layouts of keys and values."""

from flaxen.cache.dense import Cache, Dense, fits, room_for

__all__ = ["Cache", "Dense", "fits", "room_for"]
