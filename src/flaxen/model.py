"""The Model: parts, how they run, and where they came from."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.adapter import Adapting
from flaxen.continuing import Continuing
from flaxen.convert.report import Report
from flaxen.convert.transforms import Applied
from flaxen.core.tree import is_param, module, paths, static
from flaxen.edit import Editable
from flaxen.layers.runtime import PLAIN, Runtime
from flaxen.models.skeleton import How, only_taken
from flaxen.tune import with_dropout


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the checkpoint says (compared by value) and where it came from (not compared).

    `quantization_json` says how the weights that stay packed are stored.
    """

    config_json: str
    runtime: Runtime = PLAIN
    folder: Path | None = dataclasses.field(default=None, compare=False)
    generation_json: str | None = dataclasses.field(default=None, compare=False)
    loading: Report | None = dataclasses.field(default=None, compare=False)
    applied: Applied | None = dataclasses.field(default=None, compare=False)
    quantization_json: str | None = dataclasses.field(default=None, compare=False)


@functools.lru_cache(maxsize=64)
def _config(config_json: str) -> Any:
    from flaxen.families.config import hf_config

    return hf_config(json.loads(config_json))


@module
class Model(Editable, Continuing, Adapting):
    """A model: a pytree whose leaves are its weights. What kind of model it is, and how it is
    called, is up to its `module` (`flaxen.models.skeleton`).

    `module` is the tree of parts; gradients, optimiser states and abstract models are Models too.
    """

    module: Any
    origin: static[Origin]

    @property
    def config(self) -> Any:
        """The Hugging Face config object."""
        return _config(self.origin.config_json)

    @property
    def generation_config(self) -> dict[str, Any] | None:
        text = self.origin.generation_json
        return None if text is None else json.loads(text)

    @property
    def runtime(self) -> Runtime:
        return self.origin.runtime

    @property
    def loading(self) -> Report | None:
        """What loading found: missing, unexpected, mismatched, tied, unread config keys, bytes
        read.
        """
        return self.origin.loading

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self.runtime.placement.mesh if self.runtime.placement else None

    def parameters(self) -> dict[str, Any]:
        """Weights (or, of an abstract model, their descriptions) by path."""
        return paths(self.module, is_param)

    @property
    def num_parameters(self) -> int:
        """Of weights that are stored packed, the weights themselves, not what stores them."""
        from flaxen.quantize import QuantizedWeight

        leaves = paths(self.module, lambda x: is_param(x) or isinstance(x, QuantizedWeight))
        return sum(math.prod(x.shape) for x in leaves.values())

    def replace(self, *, module: Any = None, runtime: Runtime | None = None) -> Model:
        """The same model with other parts, or run in another way."""
        origin = (
            self.origin if runtime is None else dataclasses.replace(self.origin, runtime=runtime)
        )
        return Model(module=self.module if module is None else module, origin=origin)

    def __call__(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        params: Any = None,
        past_key_values: Any = None,
        dropout_rng: Any = None,
        train: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
        extra_embedding: Any = None,
        vision_mask: Any = None,
        add_params_field: bool = False,
        *,
        segment_ids: Any = None,
        labels: Any = None,
        output_router_logits: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """What the model makes of its inputs, with Hugging Face's argument and result names.

        Token ids (B, T); attention_mask (B, T) is 0 for padding on either side; labels as
        Transformers takes them (unshifted, -100 ignored) give `.loss`. params stands in for the
        model's own weights. Numbers are dropped only with `train` and a `dropout_rng`.

        A causal language model gives logits. segment_ids (B, T) tells packed documents apart;
        past_key_values is a cache from `init_cache`, and a longer one comes back. extra_embedding
        (B, T, D) is added to the tokens' embeddings, where vision_mask (B, T) is not 0 if given.
        output_router_logits gives the scores of routers, and adds their loss; None is what the
        config says.
        A model that sees takes pixel_values, and what else says its page, docs/images.md.
        An encoder takes token_type_ids (B, T), and gives what its head does: see `models.heads`.

        Raises:
            InputError: for inputs that this kind of models does not take, shapes that do not fit
            together or ids outside the vocabulary.
            CacheError: for more tokens than the cache has room for, or a cache whose keys would be
            others by now (LongRoPE).
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "extra_embedding": extra_embedding,
            "vision_mask": vision_mask,
            "segment_ids": segment_ids,
            "labels": labels,
            **inputs,
        }
        from flaxen import calling

        module = calling.weights(self.module, params, add_params_field)
        key = calling.dropout_key(module, dropout_rng, train)
        how = How(
            self.runtime,
            train,
            key,
            output_hidden_states,
            output_attentions,
            calling.router_logits(module, output_router_logits),
        )
        out = with_dropout(module, key).call(how, **only_taken(module, given))
        return out if return_dict else out.to_tuple()

    def loss(
        self,
        input_ids: Any = None,
        labels: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        segment_ids: Any = None,
        **inputs: Any,
    ) -> jax.Array:
        """The loss of calling the model with these labels, alone: a causal language model makes no
        logits for it, so that a large vocabulary costs no memory.
        """
        from flaxen import calling

        given = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "segment_ids": segment_ids,
            **inputs,
        }
        module = calling.weights(self.module, None, False)
        return module.loss_alone(How(self.runtime), **only_taken(module, given))

    def embed(self, texts: str | Sequence[str], **options: Any) -> np.ndarray:
        """One float32 vector for each text, (N, E). See `flaxen.embed.embed`."""
        from flaxen.embed import embed

        return embed(self, texts, **options)

    def init_weights(self, rng: Any, input_shape: tuple[int, int] = (1, 1)) -> Model:
        """The model with fresh weights, a function of `rng` (a seed, or a key of jax) and of each
        weight's name alone. See `flaxen.fresh.filled`.
        """
        from flaxen.fresh import filled

        return filled(self, rng, input_shape)

    def explain(self, queries: int = 1024, keys: int | None = None) -> list[dict[str, Any]]:
        """Which attention each kind of layer would use for so many queries and keys (as many,
        unless given), and why. See `flaxen.show.attention_choices`.
        """
        from flaxen.show import attention_choices

        dtype = self.runtime.weights.dtype or str(next(iter(self.parameters().values())).dtype)
        return attention_choices(
            self.module, queries=queries, keys=keys or queries, dtype=dtype, runtime=self.runtime
        )

    def reshard(self, mesh: Any, plan: Any = None) -> Model:
        """The same model on another mesh, or by another plan. See `flaxen.reshard.reshard`."""
        from flaxen.reshard import reshard

        return reshard(self, mesh, plan)

    def quantize(self, bits: Any = 8) -> Model:
        """The same model with projections rounded to 8 or 4 bits; what is left is shared.

        bits: for all projections but heads and routers, or by path: {"mlp": 4, "embed_tokens": 8,
        "lm_head": None}, the first expression that is found in a path counts. Instead of a number
        a `flaxen.quantize.Rounding` may say which inputs share a scale.

        Raises:
            ConfigError: a rule that is found nowhere, or weights that cannot be rounded so.
        """
        from flaxen.quantize import rounded

        runtime = self.runtime.with_bits(bits)
        return self.replace(module=rounded(self.module, bits), runtime=runtime)

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write a Hugging Face folder: weights, config, generation config, tokenizer files. See
        `flaxen.export.save`.
        """
        from flaxen.export import save

        save(self, folder, **options)

    def __repr__(self) -> str:
        leaves = self.parameters().values()
        dtypes = sorted({str(x.dtype) for x in leaves if getattr(x, "dtype", None) is not None})
        kind = json.loads(self.origin.config_json).get("model_type")
        mesh = f", mesh {dict(self.mesh.shape)}" if self.mesh else ""
        return (
            f"Model({kind}, {self.num_parameters / 1e6:,.1f}M parameters, {'/'.join(dtypes)}"
            f"{mesh}, attention {self.runtime.attention.mechanism!r})"
        )
