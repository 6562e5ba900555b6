"""A prompt with pictures: the words around each, and as many places as it has tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.text import encode, encode_rendered, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BREAK, END = "[IMG_BREAK]", "[IMG_END]"
"""Pixtral's words after each row of patches, and after the last."""


def pictured_prompt(
    model: Any,
    tok: PreTrainedTokenizerFast,
    processor: Any,
    images: Sequence[Any],
    text: str,
    *,
    system: str | None = None,
    raw: bool = False,
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Token ids of one prompt, and its pictures as `model.generate` takes them.

    The pictures come before the text, as one user's message through the chat template; with `raw`
    the text stands as it is, and has the model's word for a picture where one belongs, or else they
    come first.

    Raises:
        InputError: a model that takes no pictures, or a text with another number of them.
    """
    module = model.module
    if not module.pictured():
        raise InputError(f"This model is {module.kind()}: it takes no pictures.")
    given = arrays(module, processor, images)
    word = placeholder(model.config, tok)
    if raw:
        text = text if word in text else word * len(images) + text
    else:
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        said = [{"role": "user", "content": parts}]
        text = render_chat(tok, said, system=system, pictures=True)
    pieces = text.split(word)
    if len(pieces) != len(images) + 1:
        raise InputError(
            f"The text has {len(pieces) - 1} places for pictures ({word}), and {len(images)} are "
            "given. Does the chat template of this model know pictures?"
        )
    filled = pieces[0]
    for words, piece in zip(places(model, tok, given, len(images)), pieces[1:], strict=True):
        filled += words + piece
    return (encode if raw else encode_rendered)(tok, filled), given


def arrays(module: Any, processor: Any, images: Sequence[Any]) -> dict[str, np.ndarray]:
    """What the image processor makes of pictures, as far as the model takes it."""
    size = getattr(module.vision, "size", None)
    # Sizes must be whole tokens, not only whole patches.
    more = {} if size is None else {"patch_size": _whole(size, module.vision.merge)}
    made = processor(images=list(images), return_tensors="np", **more)
    return {name: np.asarray(made[name]) for name in module.pictured() if name in made}


def _whole(size: tuple[int, int], merge: int) -> dict[str, int]:
    return {"height": size[0] * merge, "width": size[1] * merge}


def placeholder(config: Any, tok: PreTrainedTokenizerFast) -> str:
    """The word that stands for one picture in a text; Gemma's is that before a picture."""
    token = getattr(config, "boi_token_index", None) or config.image_token_id
    return _word(tok, token)


def places(
    model: Any, tok: PreTrainedTokenizerFast, given: dict[str, np.ndarray], count: int
) -> list[str]:
    """What each picture becomes in the text."""
    config, vision = model.config, model.module.vision
    word = _word(tok, config.image_token_id)
    if "image_grid_thw" in given:
        sizes = given["image_grid_thw"].prod(1) // vision.merge**2
        return [word * int(n) for n in sizes]
    if "image_sizes" in given:
        step = np.array(vision.size) * vision.merge
        return [_rows(word, *map(int, size // step)) for size in given["image_sizes"]]
    if getattr(config, "boi_token_index", None) is None:
        return [word * vision.tokens] * count
    begin, end = (_word(tok, x) for x in (config.boi_token_index, config.eoi_token_index))
    return [f"\n\n{begin}{word * vision.tokens}{end}\n\n"] * count


def _rows(word: str, rows: int, columns: int) -> str:
    lines = [word * columns] * rows
    return BREAK.join(lines) + END


def _word(tok: PreTrainedTokenizerFast, token: int) -> str:
    word = tok.convert_ids_to_tokens(token)
    if not isinstance(word, str):
        raise InputError(f"The tokenizer has no word for token {token}, which is of pictures.")
    return word
