"""The rule of rounding, against float64 NumPy, and its lazy parts."""

from __future__ import annotations

import numpy as np
import pytest

from flaxen.convert.arrays import ArrayTensor
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.quantize import Rounding, rounded_tensors
from flaxen.quantize.rounded_tensors import rounded_parts

RULES = [Rounding(8), Rounding(4, 32), Rounding(8, 16), Rounding(4, -1), Rounding(4)]


def truth(w, bits, group):
    """Codes, scales and values in float64, one group at a time."""
    codes, values = np.zeros(w.shape, np.int64), np.zeros(w.shape)
    scales = np.zeros((*w.shape[:-1], w.shape[-1] // group), np.float16)
    half = 2 ** (bits - 1)
    for where in np.ndindex(scales.shape):
        *row, g = where
        cut = (*row, slice(g * group, (g + 1) * group))
        part = w[cut].astype(np.float64)
        exact = np.abs(part).max() / (half - 0.5)
        scale = np.float16(exact)
        if float(scale) < exact:
            scale = np.nextafter(scale, np.float16(np.inf))
        scales[where] = scale = scale if scale > 0 else np.float16(1)
        codes[cut] = np.clip(np.rint(part / float(scale)), -half, half - 1)
        values[cut] = codes[cut] * float(scale)
    return codes, scales, values


def weights(shape=(6, 128), seed=0):
    """Normal numbers, a group of zeros, and exact halves of steps in another row."""
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    w[..., 1, :] = 0
    w[..., 2, :] = (np.arange(shape[-1]) % 16 - 7.5) * 0.25
    return w


def parts_of(w, rounding):
    fitted = rounding.fitted(*w.shape[-2:])
    return fitted, {k: t.read() for k, t in rounded_parts(ArrayTensor(w), fitted).items()}


@pytest.mark.parametrize("rounding", RULES, ids=str)
@pytest.mark.parametrize("shape", [(6, 128), (2, 6, 128)])
def test_codes_are_those_of_float64_bit_by_bit(rounding, shape):
    w = weights(shape)
    fitted, parts = parts_of(w, rounding)
    codes, scales, values = truth(w, fitted.bits, fitted.group)
    np.testing.assert_array_equal(fitted.codes(parts["codes"]), codes)
    np.testing.assert_array_equal(parts["scales"], scales)
    np.testing.assert_array_equal(fitted.values(parts), values.astype(np.float32))


@pytest.mark.parametrize("rounding", RULES, ids=str)
def test_a_value_is_off_by_half_a_scale_at_most(rounding):
    w = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    fitted, parts = parts_of(w, rounding)
    off = np.abs(fitted.values(parts).astype(np.float64) - w)
    scales = np.repeat(parts["scales"].astype(np.float64), fitted.group, -1)
    assert (off <= scales / 2 * (1 + 1e-6)).all()
    assert off.max() > scales.min() / 4


def test_four_bits_take_half_a_byte():
    w = weights()
    _, eight = parts_of(w, Rounding(8))
    _, four = parts_of(w, Rounding(4))
    assert eight["codes"].nbytes == w.size
    assert four["codes"].nbytes == w.size // 2
    # An even output is in the low half of the byte, the odd one after it in the high half.
    codes, _, _ = truth(w, 4, 128)
    byte = int(four["codes"][1, 5])
    assert (byte & 15, byte >> 4) == (codes[2, 5] % 16, codes[3, 5] % 16)


@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(8)], ids=str)
@pytest.mark.parametrize("chunk", [1 << 9, 1 << 12, 1 << 20])
def test_a_box_holds_what_the_whole_holds_there(monkeypatch, rounding, chunk):
    monkeypatch.setattr(rounded_tensors, "CHUNK", chunk)
    w = weights((2, 8, 128))
    _, whole = parts_of(w, rounding)
    for role, at in (("codes", np.s_[1:2, 1:3, 24:72]), ("scales", np.s_[0:2, 3:5, 0:1])):
        fresh = rounded_parts(ArrayTensor(w), rounding.fitted(8, 128))
        np.testing.assert_array_equal(fresh[role].read(at), whole[role][at])


def test_reading_holds_a_few_values_at_a_time_and_reads_each_once(monkeypatch):
    monkeypatch.setattr(rounded_tensors, "CHUNK", 1 << 12)
    source = ArrayTensor(weights((64, 128)))
    parts = rounded_parts(source, Rounding(4, 32))
    read, fill = [], ArrayTensor._fill_own

    def counted(self, box, out):
        read.append(out.nbytes)
        return fill(self, box, out)

    monkeypatch.setattr(ArrayTensor, "_fill_own", counted)
    monkeypatch.setattr(Rounding, "scales", lambda self, v: np.ones((*v.shape[:-1], 4), np.float16))
    parts["codes"].read()
    parts["scales"].read()
    assert max(read) <= 1 << 12
    assert sum(read) == source.nbytes


def test_the_usual_group_divides_the_inputs():
    found = [Rounding(4).fitted(2, ins).group for ins in (256, 192, 96, 80)]
    assert found == [128, 64, 32, 80]
    assert Rounding(8).fitted(3, 80).group == 80


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rounding(5), "bits is 5; expected 8 or 4"),
        (lambda: Rounding(4, 0), "group is 0"),
        (lambda: Rounding(4, 48).fitted(2, 64), "64 inputs do not divide into groups of 48"),
        (lambda: Rounding(4).fitted(3, 64), "3 outputs are odd"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_values_without_a_scale_are_refused(bad):
    w = weights()
    w[3, 3] = bad
    with pytest.raises(CheckpointError, match="can only be finite"):
        parts_of(w, Rounding(8))
