"""Generation: sampling, loops, streams of tokens and of text."""

from flaxen.generate.answering import answer
from flaxen.generate.loop import generate
from flaxen.generate.settings import Settings
from flaxen.generate.stream import Stats, Stream, stream
from flaxen.generate.text import Result, text

__all__ = ["Result", "Settings", "Stats", "Stream", "answer", "generate", "stream", "text"]
