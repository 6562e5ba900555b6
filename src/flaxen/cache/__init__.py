"""What decoding remembers: layouts x codecs."""

from flaxen.cache.cache import Cache, fits, is_cache, room_for
from flaxen.cache.codec import CODECS, AsIs, Codec, Fp8, Int4, Int8, codec_for
from flaxen.cache.crossed import Crossed
from flaxen.cache.dense import Dense, Latent
from flaxen.cache.empty import (
    Order,
    check_memory,
    described,
    empty,
    keys_and_values,
    latents,
    states,
)
from flaxen.cache.file import Stored, fingerprint, load, save, stored
from flaxen.cache.layout import KeysValues, Layout, NewTokens
from flaxen.cache.paged import Paged, Pages
from flaxen.cache.recurrent import Recurrent
from flaxen.cache.ring import Ring
from flaxen.cache.settings import CacheSettings

__all__ = [
    "CODECS",
    "AsIs",
    "Cache",
    "CacheSettings",
    "Codec",
    "Crossed",
    "Dense",
    "Fp8",
    "Int4",
    "Int8",
    "KeysValues",
    "Latent",
    "Layout",
    "NewTokens",
    "Order",
    "Paged",
    "Pages",
    "Recurrent",
    "Ring",
    "Stored",
    "check_memory",
    "codec_for",
    "described",
    "empty",
    "fingerprint",
    "fits",
    "is_cache",
    "keys_and_values",
    "latents",
    "load",
    "room_for",
    "save",
    "states",
    "stored",
]
