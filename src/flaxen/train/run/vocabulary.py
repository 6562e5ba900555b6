"""Whether a model has what its data is made of: a row for each token, a place for each slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.train.data.prompts import Prompts
from flaxen.train.data.stream import Stream
from flaxen.train.objectives import Source


def check_length(module: Any, seq_len: int) -> None:
    """
    Raises:
        InputError: rows are longer than the model has positions for.
    """
    most = module.longest()
    if most is not None and seq_len > most:
        raise InputError(
            f"seq_len is {seq_len}, but this model has positions for {most} tokens; say seq_len "
            f"of at most {most}."
        )


def check_vocabulary(module: Any, tok: Any, *sources: Source | None) -> None:
    """Gone through only if the tokenizer knows tokens beyond the model's, which many never use.

    Raises:
        InputError: data has a token that the model has no row for.
    """
    if module.embed_tokens is None:
        return
    vocab = module.embed_tokens.vocab_size
    if max(tok.get_vocab().values(), default=0) < vocab:
        return
    for source in sources:
        if isinstance(source, Prompts):
            for one in source.asked:
                check_ids({"ids": np.asarray(one.ids)}, vocab)
        elif source is not None and not isinstance(source, Stream):
            for step in range(source.per_epoch):
                check_ids(source.batch_at(step), vocab)


def check_ids(batch: Mapping[str, np.ndarray], vocab: int) -> None:
    """
    Raises:
        InputError: a token id of a batch lies beyond the vocabulary.
    """
    ids = [array for key, array in batch.items() if "ids" in key.split("_")]
    greatest = max((int(array.max()) for array in ids if array.size), default=0)
    if greatest >= vocab:
        raise InputError(
            f"The data has the token id {greatest}, but the model has {vocab} tokens: the "
            "tokenizer is not this model's. Give the model's own, or enlarge its vocabulary first "
            "(resize_token_embeddings)."
        )
