"""Each vector is stored by itself, within a bound that follows from its largest channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flaxen.cache import CacheSettings, codec_for
from flaxen.core.errors import ConfigError

CODECS = ["int8", "int4", "fp8"]
DTYPES = ["float32", "bfloat16", "float16"]


def vectors(dtype: str = "float32", width: int = 16) -> np.ndarray:
    """Standard normal keys, (2, 3, 9, width), with one channel a hundred times as large."""
    x = np.random.default_rng(0).normal(size=(2, 3, 9, width))
    x[..., 5 % width] *= 100
    return np.asarray(jnp.asarray(x, dtype))


def there_and_back(name: str | None, x: np.ndarray) -> np.ndarray:
    codec = codec_for(name, x.dtype)
    return np.asarray(codec.decode(codec.encode(jnp.asarray(x)), jnp.float32), np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", 14)])
def test_error_is_at_most_half_a_step_even_with_an_outlier_channel(name, steps, dtype):
    x = vectors(dtype).astype(np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    error = np.abs(there_and_back(name, vectors(dtype)) - x)
    assert (error <= largest / steps + np.spacing(largest.astype(np.float32))).all()
    assert (error * steps / largest).max() > 0.9


def test_fp8_keeps_four_bits_of_every_channel():
    x = vectors().astype(np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    error = np.abs(there_and_back("fp8", vectors()) - x)
    assert (error <= np.maximum(np.abs(x) / 16, largest / 2**18) * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_is_is_exact(dtype):
    x = vectors(dtype)
    np.testing.assert_array_equal(there_and_back(None, x), x.astype(np.float64))


@pytest.mark.parametrize("name", CODECS)
def test_largest_channels_and_zeros_come_back_exactly(name):
    x = np.zeros((2, 4), np.float32)
    x[0] = [0, -3.3, 3.3, 0]
    np.testing.assert_allclose(there_and_back(name, x), x.astype(np.float64), rtol=1e-7)


@pytest.mark.parametrize("name", CODECS)
def test_a_nan_is_not_hidden(name):
    x = np.array([[1, np.nan], [1, 2]], np.float32)
    assert np.isnan(there_and_back(name, x)).any(-1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "dtype", "nbytes"),
    [
        (None, "bfloat16", 128),
        ("int8", "bfloat16", 64 + 2),
        ("int4", "bfloat16", 32 + 2),
        ("fp8", "float32", 64 + 4),
    ],
)
def test_bytes_of_a_vector_of_64_channels(name, dtype, nbytes):
    stored = jax.eval_shape(codec_for(name, dtype).encode, jax.ShapeDtypeStruct((1, 64), dtype))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored)) == nbytes


def test_two_codes_share_a_byte_whatever_the_width():
    x = np.array([[-7, -3, 0, 2, 7]], np.float32)
    stored = codec_for("int4", np.float32).encode(jnp.asarray(x))
    # Halves of three codes, 8 is zero: 1 5 8 | 10 15 and a channel that does not exist.
    assert np.asarray(stored.codes).tolist() == [[1 | 10 << 4, 5 | 15 << 4, 8]]
    np.testing.assert_allclose(there_and_back("int4", x), x.astype(np.float64), rtol=1e-6)


def test_vectors_wider_than_the_cache_are_rounded_first():
    x = vectors()
    codec = codec_for("int8", jnp.bfloat16)
    stored = codec.encode(jnp.asarray(x))
    assert stored.largest.dtype == ml_dtypes.bfloat16
    assert np.abs(np.asarray(stored.codes, int)).max() == 127


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"codec": "int9"}, "cache codec 'int9'. Did you mean 'int"),
        ({"layout": "rings"}, "layout is 'rings'; .* Did you mean 'ring'"),
        ({"page_size": 0}, "page_size is 0"),
        ({"codec": ["int8"]}, "Unknown cache codec"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        CacheSettings(**wrong)
