"""Two tiny tokenizers: byte-level BPE, and a SentencePiece one as a GGUF file carries it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import hub as hub
from tiny_words import CHATML, MERGES, byte_tokens, write_words


@pytest.fixture(scope="session")
def byte_file(tmp_path_factory) -> Path:
    tokens = byte_tokens()

    def extra(writer):
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(tokens.index("<bos>"))
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_chat_template(CHATML)

    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    path = tmp_path_factory.mktemp("words") / "byte.gguf"
    return write_words(path, "gpt2", tokens, kinds, extra)


@pytest.fixture
def tok(byte_file):
    from flaxen.text import tokenizer

    return tokenizer(byte_file)


@pytest.fixture
def piece_file(tmp_path) -> Path:
    pieces = ["▁hello", "hello", "llo", "he", "ll", *"▁helowrd", "el"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, "  "]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    return write_words(
        tmp_path / "pieces.gguf", "llama", tokens, kinds, lambda w: w.add_token_scores(scores)
    )


@pytest.fixture
def piece_tok(piece_file):
    from flaxen.text import tokenizer

    return tokenizer(piece_file)
