"""One vector for each text: what a sentence-transformers folder says, and running it."""

from __future__ import annotations

from flaxen.embed.recipe import Recipe, recipe_of
from flaxen.embed.run import embed

__all__ = ["Recipe", "embed", "recipe_of"]
