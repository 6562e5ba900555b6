"""Texts to vectors, in batches of texts that are about equally long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.checks import at_least
from flaxen.core.errors import InputError
from flaxen.core.progress import Progress, reporting
from flaxen.embed.recipe import Recipe, recipe_of
from flaxen.generate.buckets import bucket
from flaxen.layers.runtime import Runtime
from flaxen.text import tokenized, tokenizer

NO_LIMIT = 10**9
"""Of models and tokenizers that know none; what tokenizers say then is no number of tokens."""


def embed(
    model: Any,
    texts: str | Sequence[str],
    *,
    batch_size: int = 32,
    prompt: str | None = None,
    prompt_name: str | None = None,
    tok: Any = None,
    recipe: Recipe | None = None,
    progress: Progress = True,
) -> np.ndarray:
    """One float32 vector for each text, (N, E); of a single text (E,).

    The model's folder says how: pooling, layers on top, prompts (`modules.json` of
    sentence-transformers; without it, the mean of all tokens, or the vector that a model compares
    with those of pictures). Texts are cut at its greatest length. They run longest first, in rows
    of a few lengths, so that few programs are compiled.

    prompt: a text before every text; prompt_name: one of the folder's own ("query").
    tok, recipe: instead of those of the folder. progress: see `load`; it counts texts.

    Raises:
        InputError: no texts, a prompt that there is not, or a model without a folder and no `tok`.
        ConfigError: a folder that wants what is not known here.
    """
    one = isinstance(texts, str)
    if not isinstance(texts, Iterable):
        raise InputError(f"texts are {texts!r}; expected a string, or several.")
    given = [texts] if isinstance(texts, str) else list(texts)
    odd = next((x for x in given if not isinstance(x, str)), None)
    if odd is not None:
        raise InputError(f"texts hold a {type(odd).__name__}; expected strings.")
    at_least("batch_size", batch_size, 1)
    folder = model.origin.folder
    if folder is not None:
        recipe, tok = recipe or recipe_of(folder), tok or tokenizer(folder)
    elif tok is None:
        raise InputError("This model comes of no folder, so it has no tokenizer; pass tok=.")
    recipe = recipe or Recipe()
    before = recipe.prompt(prompt, prompt_name)
    limit = _limit(model, tok, recipe)
    rows = [_tokens(tok, before + (x.lower() if recipe.lower else x), limit) for x in given]
    run = partial(_vectors, model.module, (recipe.pool, *recipe.steps), runtime=model.runtime)
    width = jax.eval_shape(run, *_laid([[]], 1, min(16, limit), 0)).shape[-1]
    out = np.zeros((len(rows), width), np.float32)
    pad = 0 if tok.pad_token_id is None else tok.pad_token_id
    with reporting(progress, "Embedding", len(rows), unit="texts") as report:
        for batch in _batches([len(row) for row in rows], batch_size):
            longest = max(len(rows[i]) for i in batch)
            size = model.module.row_length() or min(bucket(longest), limit)
            count = min(batch_size, 1 << (len(batch) - 1).bit_length())
            ids, mask = _laid([rows[i] for i in batch], count, size, pad)
            out[batch] = np.asarray(run(ids, mask))[: len(batch)]
            if report is not None:
                report(len(batch))
    return out[0] if one else out


@partial(jax.jit, static_argnames="runtime")
def _vectors(
    module: Any, steps: tuple[Any, ...], ids: jax.Array, mask: jax.Array, *, runtime: Runtime
) -> jax.Array:
    pool, *rest = steps
    if module.own_vectors:
        x = module.text_vectors(ids, mask, runtime).astype(jnp.float32)
    else:
        x = module.features(ids, mask, runtime).astype(jnp.float32)
        x = pool(x, mask.astype(bool))
    for step in rest:
        x = step(x)
    return x


def _limit(model: Any, tok: Any, recipe: Recipe) -> int:
    """The most tokens of a row; NO_LIMIT for a model that reads any length."""
    config = getattr(model.config, "max_position_embeddings", None)
    limits = [recipe.max_length, tok.model_max_length, model.module.longest() or config]
    return int(min((x for x in limits if x is not None and x < NO_LIMIT), default=NO_LIMIT))


def _tokens(tok: Any, text: str, limit: int) -> list[int]:
    cut: dict[str, Any] = {} if limit == NO_LIMIT else {"truncation": True, "max_length": limit}
    return tokenized(tok, text, **cut)["input_ids"]


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices of texts, longest first: what needs most memory fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _laid(rows: Sequence[Sequence[int]], count: int, length: int, pad: int) -> Any:
    """Token ids and mask (count, length), with padding on the right and below."""
    ids, mask = np.full((count, length), pad, np.int32), np.zeros((count, length), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask
