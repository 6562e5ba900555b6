"""What a Model remembers between calls: caches, and text that goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.core.errors import CacheError
from flaxen.layers.runtime import RINGS
from flaxen.models.outputs import CausalOutput
from flaxen.models.skeleton import only_generating


class Continuing:
    """The methods of a Model that go on from what is in a cache."""

    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, max_length: int, attention_mask: Any = None
    ) -> dict[str, Any]:
        """What the first of several calls is given besides prompts (B, T): a cache of `max_length`
        slots, a mask of every slot, and positions that count real tokens.
        """
        from flaxen.calling import prepared

        rows, used = np.shape(input_ids)
        if used > max_length:
            raise CacheError(
                f"max_length is {max_length} and the prompts have {used} tokens; expected at "
                "least as many."
            )
        return prepared(self.init_cache(rows, max_length), input_ids, max_length, attention_mask)

    def update_inputs_for_generation(
        self: Any, outputs: CausalOutput, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What the next call is given besides one new token for each row."""
        from flaxen.calling import updated

        return updated(outputs, kwargs)

    def init_cache(self: Any, batch_size: int, max_length: int, dtype: Any = None) -> Any:
        """An empty cache for `past_key_values`, with `max_length` slots a row, laid out and stored
        as `runtime.cache` says.

        Raises:
            CacheError: for a size that holds nothing, or more than there is memory for.
        """
        from flaxen.cache import check_memory, empty

        if batch_size < 1 or max_length < 1:
            raise CacheError(
                f"A cache of {batch_size} rows and {max_length} slots holds nothing; expected at "
                "least one of each."
            )
        only_generating(self.module, "remember tokens in a cache")
        shapes = self.module.cache_shapes(batch_size, max_length, dtype, self.runtime)
        check_memory(shapes)
        return empty(shapes)

    def save_cache(self: Any, cache: Any, path: str | Path) -> None:
        """Write a cache as a safetensors file, for this model to go on from another day."""
        from flaxen.cache import fits, is_cache, save

        only_generating(self.module, "remember tokens in a cache")
        is_cache(cache)
        fits(cache, self.module.cache_shapes(cache.keep.shape[0], 1, runtime=RINGS))
        save(cache, path, self._fingerprint())

    def load_cache(self: Any, path: str | Path) -> Any:
        """What `save_cache` wrote, bit by bit, laid out as it was, on this model's mesh.

        Raises:
            CacheError: when it is another model's, or no cache.
        """
        from flaxen.cache import load, stored

        only_generating(self.module, "remember tokens in a cache")
        about = stored(path)
        settings = dataclasses.replace(about.settings, sharded=self.runtime.cache.sharded)
        runtime = dataclasses.replace(self.runtime, cache=settings)
        like = self.module.cache_shapes(about.batch, about.length, about.dtype, runtime)
        return load(path, like, self._fingerprint())

    def _fingerprint(self: Any) -> str:
        from flaxen.cache import fingerprint

        return fingerprint(self.origin.config_json, jax.tree.leaves(self.module))

    def can_generate(self: Any) -> bool:
        """Whether it goes on with a text, or answers one, token by token."""
        return self.module.generates or self.module.answers

    def generate(
        self: Any, input_ids: Any = None, attention_mask: Any = None, **settings: Any
    ) -> Any:
        """Prompts (B, T) -> (B, T + n) token ids; greedy unless sampling is asked for. See
        `flaxen.generate.generate`, and `flaxen.generate.answer` for encoder-decoders, which give
        their answer alone.
        """
        from flaxen.generate import answer, generate

        if self.module.answers:
            return answer(self, input_ids, attention_mask, **settings)
        return generate(self, input_ids, attention_mask, **settings)

    def transcribe(self: Any, audio: Any, **settings: Any) -> Any:
        """What is said in a WAV file, or in samples: Whisper's. See `flaxen.speech.transcribe`."""
        from flaxen.speech import transcribe

        return transcribe(self, audio, **settings)
