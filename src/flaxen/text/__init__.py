"""Text: tokenizers, chat templates and streams of text."""

from __future__ import annotations

from flaxen.text.chat import (
    encode_all_rendered,
    encode_chat,
    encode_rendered,
    learned_tokens,
    render_chat,
    render_with_mask,
    render_with_spans,
    tokens_in,
)
from flaxen.text.streaming import TextStream
from flaxen.text.token_texts import token_texts
from flaxen.text.tokenizer import (
    decode,
    encode,
    encode_all,
    encode_all_with_offsets,
    tokenized,
    tokenizer,
)

__all__ = [
    "TextStream",
    "decode",
    "encode",
    "encode_all",
    "encode_all_rendered",
    "encode_all_with_offsets",
    "encode_chat",
    "encode_rendered",
    "learned_tokens",
    "render_chat",
    "render_with_mask",
    "render_with_spans",
    "token_texts",
    "tokenized",
    "tokenizer",
    "tokens_in",
]
