"""What decoding remembers: layouts of keys and values."""

from flaxen.cache.dense import Cache, Dense, fits, room_for
from flaxen.cache.settings import CacheSettings

__all__ = ["Cache", "CacheSettings", "Dense", "fits", "room_for"]
