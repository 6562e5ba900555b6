"""Speech: audio files, spectrograms, and what Whisper makes of them."""

from flaxen.speech.audio import RATE, read_wav, resampled
from flaxen.speech.spectrogram import log_mel
from flaxen.speech.transcribe import Segment, Transcript, transcribe

__all__ = ["RATE", "Segment", "Transcript", "log_mel", "read_wav", "resampled", "transcribe"]
