"""Audio: WAV files, and samples at the rate that a model wants."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from flaxen.core.errors import InputError

RATE = 16_000
"""Samples a second that Whisper hears."""

RATES = range(1_000, 1_000_001)
"""Samples a second that audio is taken with: others stand in damaged files, and would have every
sample made into thousands, or of millions.
"""

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
"""Kinds of samples in a WAV file; an extensible one says its kind further on."""

CROSSINGS = 32
"""Of the filter through zero on each side: how sharply it cuts."""
PIECE = 1 << 20
"""Samples that are resampled at once."""


def read_wav(path: str | Path) -> tuple[np.ndarray, int]:
    """Samples of a WAV file as float32 from -1 to 1, (T,), and how many there are a second; the
    mean of several channels.

    Raises:
        InputError: for what is no WAV file, is cut short, or holds compressed audio.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    chunks = _chunks(data, path)
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise InputError(f"{path} has no samples: its parts are {sorted(chunks)}.")
    form = chunks[b"fmt "]
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == EXTENSIBLE and len(form) >= 26:
        (kind,) = struct.unpack("<H", form[24:26])
    if channels < 1 or rate not in RATES:
        raise InputError(
            f"{path} says {channels} channels at {rate} Hz; expected one or more, at "
            f"{RATES[0]} to {RATES[-1]} Hz."
        )
    samples = _samples(chunks[b"data"], kind, bits, path)
    whole = len(samples) // channels * channels
    return samples[:whole].reshape(-1, channels).mean(1, dtype=np.float32), rate


def _chunks(data: bytes, path: str | Path) -> dict[bytes, bytes]:
    """The named parts of a RIFF file. Some programs that write to a pipe leave sizes open: such a
    part goes on to the end.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InputError(
            f"{path} is no WAV file: it begins with {data[:12]!r}. Convert it, for example with "
            "'ffmpeg -i FILE -ar 16000 -ac 1 FILE.wav'."
        )
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data):
        name, (size,) = data[at : at + 4], struct.unpack("<I", data[at + 4 : at + 8])
        found.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return found


def _samples(data: bytes, kind: int, bits: int, path: str | Path) -> np.ndarray:
    """float32 from -1 to 1."""
    width = bits // 8
    if width:
        data = data[: len(data) // width * width]
    if (kind, bits) == (PCM, 8):
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if (kind, bits) == (PCM, 16):
        return np.frombuffer(data, "<i2").astype(np.float32) / 2**15
    if (kind, bits) == (PCM, 24):
        three = np.frombuffer(data, np.uint8).reshape(-1, 3)
        # The low byte of four is zero, so that the sign stands where it belongs.
        four = np.pad(three, [(0, 0), (1, 0)]).copy().view("<i4")
        return four[:, 0].astype(np.float32) / 2**31
    if (kind, bits) == (PCM, 32):
        return (np.frombuffer(data, "<i4") / 2**31).astype(np.float32)
    if kind == FLOAT and bits in (32, 64):
        with np.errstate(over="ignore"):  # infinite, as what is too loud for 32 bits is
            return np.frombuffer(data, f"<f{width}").astype(np.float32)
    raise InputError(
        f"{path} holds samples of kind {kind} with {bits} bits; expected PCM of 8, 16, 24 or 32 "
        "bits, or floats. Convert it, for example with 'ffmpeg -i FILE -c:a pcm_s16le FILE.wav'."
    )


def resampled(samples: np.ndarray, rate: int, to: int = RATE) -> np.ndarray:
    """Samples (T,) of one rate at another, float32: what lies above half of either is left out.

    Each new sample is a mixture of the old ones around it, by a sinc under a Kaiser window; where
    new and old samples meet again, the same mixtures come back.
    """
    if rate == to or not len(samples):
        return np.asarray(samples, np.float32)
    step = math.gcd(rate, to)
    up, down = to // step, rate // step
    reach = math.ceil(CROSSINGS * max(1, down / up))
    count = -(-len(samples) * up // down)
    padded = np.pad(np.asarray(samples, np.float32), (reach, reach + down + 1))
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        first, rest = divmod(phase * down, up)
        weights = _weights(rest / up, reach, min(1, up / down))
        windows = sliding_window_view(padded, 2 * reach + 1)[first::down]
        for at in range(0, len(range(phase, count, up)), PIECE):
            part = windows[at : at + PIECE][: len(range(phase, count, up)) - at]
            out[phase + at * up :: up][: len(part)] = part @ weights
    return out


def _weights(late: float, reach: int, cut: float) -> np.ndarray:
    """Of the samples from `reach` before to `reach` after one, for a point that is `late` behind
    it; cut: what is kept, as a share of the old rate's half.
    """
    away = np.arange(-reach, reach + 1) - late
    window = np.i0(12 * np.sqrt(np.clip(1 - (away / (reach + 1)) ** 2, 0, 1))) / np.i0(12)
    return (cut * np.sinc(cut * away) * window).astype(np.float32)
