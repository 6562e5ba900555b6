"""The tokenizer a GGUF file carries, rebuilt as a Hugging Face one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flaxen.convert.formats.gguf_parts import read_parts
from flaxen.text.gguf_backends import BACKENDS
from flaxen.text.gguf_vocabulary import CONTROL, USER_DEFINED, Vocabulary

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast


def gguf_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`), BPE of
    characters (`gemma4`) or WordPiece (`bert`).

    Ids, special tokens, BOS/EOS habits and the chat template are the file's; `save_pretrained`
    writes it as a Hugging Face folder. Raises CheckpointError for a vocabulary of another kind.
    """
    from transformers import PreTrainedTokenizerFast

    file = read_parts(path)
    words = Vocabulary(file)
    backend = BACKENDS[words.model](words)
    backend.add_tokens(list(_added(words)))
    around = {"add_bos_token": words.adds("bos"), "add_eos_token": words.adds("eos")}
    names = _NAMED
    if words.model == "bert":  # its backend says what stands around a text
        around, names = {}, _NAMED | {"cls_token": "bos"}
    named = {name: words.special(key) for name, key in names.items()}
    length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **around,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **({"model_max_length": length} if length else {}),
        **{name: token for name, token in named.items() if token is not None},
    )


_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # the format's own spelling
    "mask_token": "mask",
}


def _added(words: Vocabulary) -> Iterator[AddedToken]:
    """Tokens looked for in a text before it is cut: control tokens, and those a user defined."""
    from tokenizers import AddedToken

    for token, kind in zip(words.tokens, words.kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            yield AddedToken(token, normalized=False, special=kind == CONTROL)
