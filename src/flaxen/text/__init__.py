"""Text: tokenizers, chat templates and streams of text."""

from __future__ import annotations

from flaxen.text.chat import encode_chat, encode_rendered, render_chat, render_with_mask
from flaxen.text.streaming import TextStream
from flaxen.text.tokenizer import decode, encode, tokenized, tokenizer

__all__ = [
    "TextStream",
    "decode",
    "encode",
    "encode_chat",
    "encode_rendered",
    "render_chat",
    "render_with_mask",
    "tokenized",
    "tokenizer",
]
