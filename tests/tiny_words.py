"""Tiny vocabularies, written as GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokens() -> list[str]:
    """The 256 letters of byte-level BPE, a few joined ones, and the special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return [
        *letters,
        "he",
        "ll",
        "llo",
        "hello",
        "Ġhello",
        "ĊĊ",
        "<bos>",
        "<|im_start|>",
        "<|im_end|>",
    ]


MERGES = ["h e", "l l", "ll o", "he llo", "Ġ hello", "Ċ Ċ"]


def write_words(path: Path, model: str, tokens, kinds, extra=lambda writer: None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
