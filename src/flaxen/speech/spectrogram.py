"""Log-mel spectrograms, as Whisper was trained on (arXiv 2212.04356)."""

from __future__ import annotations

import functools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from flaxen.core.errors import InputError
from flaxen.speech.audio import RATE

WINDOW, HOP = 400, 160
"""Samples that a frame looks at, and from one frame to the next."""
TOP = 8000.0
"""Hertz of the highest filter's end."""
FRAMES = 4096
"""Frames that are transformed at once."""


def log_mel(samples: np.ndarray, mels: int = 80) -> np.ndarray:
    """Samples (T,) at 16 kHz -> (mels, T // 160) float32: about -1 to 1, 8 orders of magnitude from
    the loudest down.
    """
    samples = np.asarray(samples, np.float32)
    if samples.ndim != 1 or len(samples) < HOP:
        raise InputError(
            f"The audio has shape {samples.shape}; expected (T,) with T from {HOP} on."
        )
    half = WINDOW // 2
    mode = "reflect" if len(samples) > half else "symmetric"
    windows = sliding_window_view(np.pad(samples, half, mode=mode), WINDOW)[::HOP]
    windows = windows[: len(samples) // HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    filters, out = mel_filters(mels), np.empty((mels, len(windows)), np.float32)
    for at in range(0, len(windows), FRAMES):
        power = np.abs(np.fft.rfft(windows[at : at + FRAMES] * hann)) ** 2
        out[:, at : at + FRAMES] = np.log10(np.maximum(power @ filters, 1e-10)).T
    return (np.maximum(out, out.max() - 8) + 4) / 4


@functools.cache
def mel_filters(mels: int) -> np.ndarray:
    """What each mel takes of each frequency, (WINDOW // 2 + 1, mels): triangles of equal area that
    stand evenly on Slaney's scale.
    """
    ends = _hertz(np.linspace(_mel(0.0), _mel(TOP), mels + 2))
    frequencies = np.linspace(0, RATE // 2, WINDOW // 2 + 1)
    slopes = ends[None, :] - frequencies[:, None]
    widths = np.diff(ends)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return triangles * (2 / (ends[2:] - ends[:-2]))


KNEE = 1000.0
"""Hertz up to which the scale is even; from there on it grows by equal factors."""
EVEN, FACTOR = 3 / 200, 27 / np.log(6.4)


def _mel(hertz: float) -> float:
    if hertz < KNEE:
        return hertz * EVEN
    return KNEE * EVEN + float(np.log(hertz / KNEE)) * FACTOR


def _hertz(mel: np.ndarray) -> np.ndarray:
    knee = KNEE * EVEN
    grown = KNEE * np.exp(np.maximum(mel - knee, 0) / FACTOR)
    return np.where(mel < knee, mel / EVEN, grown)
