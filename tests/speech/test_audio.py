"""Audio files, other rates, and spectrograms."""

from __future__ import annotations

import struct
import wave

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from flaxen.core.errors import InputError
from flaxen.speech import log_mel, read_wav, resampled


def tone(hertz, rate, seconds=0.5):
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def riff(kind, bits, data, channels=1, rate=16000, extensible=False):
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, 0, 0, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    parts = (
        b"LIST" + struct.pack("<I", 3) + b"odd\0" + b"fmt " + struct.pack("<I", len(form)) + form
    )
    body = b"WAVE" + parts + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits", "stored"),
    [
        (1, 8, lambda x: np.round(x * 128 + 128).clip(0, 255).astype(np.uint8).tobytes()),
        (1, 16, lambda x: np.round(x * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes()),
        (1, 24, lambda x: b"".join(int(v * 2**23).to_bytes(3, "little", signed=True) for v in x)),
        (1, 32, lambda x: (x.astype("f8") * (2**31 - 1)).astype("<i4").tobytes()),
        (3, 32, lambda x: x.astype("<f4").tobytes()),
        (3, 64, lambda x: x.astype("<f8").tobytes()),
    ],
)
def test_every_kind_of_samples(kind, bits, stored, extensible, tmp_path):
    x = 0.9 * tone(440, 16000, 0.05)
    file = tmp_path / "x.wav"
    file.write_bytes(riff(kind, bits, stored(x), extensible=extensible))
    got, rate = read_wav(file)
    assert rate == 16000 and got.dtype == np.float32
    np.testing.assert_allclose(got, x, atol=2.0 ** -(min(bits, 24) - 2))


def test_channels_are_mixed_and_a_real_writer_is_understood(tmp_path):
    file, x = str(tmp_path / "x.wav"), tone(300, 8000)
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes((np.stack([x, 0 * x], 1) * 32767).astype("<i2").tobytes())
    got, rate = read_wav(file)
    assert rate == 8000
    np.testing.assert_allclose(got, x / 2, atol=1e-4)


def test_floats_of_64_bits_may_be_too_loud_for_32(tmp_path):
    (tmp_path / "x.wav").write_bytes(riff(3, 64, np.array([1e300, 0.5]).tobytes()))
    np.testing.assert_array_equal(read_wav(tmp_path / "x.wav")[0], [np.inf, 0.5])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"ID3\x03 an mp3 file", "no WAV file.*ffmpeg"),
        (b"", "no WAV file"),
        (riff(85, 16, bytes(8)), "kind 85 with 16 bits"),
        (riff(1, 12, bytes(8)), "12 bits"),
        (riff(1, 16, bytes(8), channels=0), "0 channels"),
        (riff(1, 16, bytes(8), rate=1), "at 1 Hz; expected one or more, at 1000 to 1000000 Hz"),
        (riff(1, 16, bytes(8), rate=2**32 - 5), "at 4294967291 Hz"),
        (riff(1, 16, bytes(8))[:30], "no samples"),
    ],
)
def test_what_is_no_audio_is_refused(data, words, tmp_path):
    file = tmp_path / "x.wav"
    file.write_bytes(data)
    with pytest.raises(InputError, match=words):
        read_wav(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_wav(tmp_path / "none.wav")


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_tones_at_other_rates(rate):
    got, want = resampled(tone(440, rate) + tone(2500, rate), rate), tone(440, 16000)
    want = want + tone(2500, 16000)
    assert abs(len(got) - len(want)) <= 1
    inner = slice(150, len(want) - 150)
    np.testing.assert_allclose(got[inner], want[inner], atol=1e-5)


def test_what_the_new_rate_cannot_hold_is_left_out():
    assert np.abs(resampled(tone(9000, 48000), 48000))[300:-300].max() < 1e-4


@pytest.mark.parametrize("mels", [80, 128])
def test_spectrograms_are_those_of_transformers(mels):
    noise = 0.05 * np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    x = np.concatenate([0.5 * tone(700, 16000, 1), noise, np.zeros(4000, np.float32)])
    theirs = WhisperFeatureExtractor(feature_size=mels)
    want = theirs(x, sampling_rate=16000, padding="longest", return_tensors="np").input_features[0]
    got = log_mel(x, mels)
    assert got.shape == want.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_too_little_audio_is_refused():
    with pytest.raises(InputError, match="from 160 on"):
        log_mel(np.zeros(10, np.float32))
