"""The metadata of a GGUF file, from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxen.convert.formats.gguf_config import GEMMA3_27B_LAYERS, llama3_divisors
from flaxen.core.errors import CheckpointError, did_you_mean

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
USUAL_PERIOD = 6

# Settings that GGUF takes for granted.
_ONLY = {
    "hidden_act": ("silu", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
}
_SCALINGS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
}


class GgufKeys:
    """What a GGUF file says about a model, and in which layout it holds its tensors.

    `config` is complete: each default is spelled out, as in a Hugging Face config object's
    `to_dict()`. Raises CheckpointError for a model that GGUF cannot say exactly.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        kind = str(config.get("model_type"))
        if kind not in ARCHITECTURES:
            raise CheckpointError(
                f"A model of type {kind!r} cannot be written as GGUF."
                f"{did_you_mean(kind, ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[kind]
        self.layers, self.hidden = self.need("num_hidden_layers"), self.need("hidden_size")
        self.heads = self.need("num_attention_heads")
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.tied = bool(config.get("tie_word_embeddings"))
        for key, allowed in _ONLY.items():
            if config.get(key) is not None and config[key] not in allowed:
                raise self.unsaid(key, config[key])
        self.theta, self.scaling = self._rope()

    def need(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise CheckpointError(
                f"The config of this {self.config['model_type']} model does not say {key}; a "
                "complete config (to_dict() of the Hugging Face object) is needed."
            )
        return self.config[key]

    def unsaid(self, key: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{key}={value!r} of this {self.config['model_type']} model cannot be said in a GGUF "
            "file: programs would run it wrongly."
        )

    def metadata(self, vocabulary: int) -> dict[str, Any]:
        """The keys of the architecture, by their full names."""
        said = {
            "vocab_size": vocabulary,
            "context_length": self.need("max_position_embeddings"),
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.need("intermediate_size"),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": float(self.need("rms_norm_eps")),
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.theta,
            **self._scaling_keys(),
        }
        if self.config["model_type"] == "mistral" and self.config.get("sliding_window"):
            said["attention.sliding_window"] = self.config["sliding_window"]
        if self.architecture == "gemma3":
            said |= self._gemma3()
        return {f"{self.architecture}.{key}": value for key, value in said.items()}

    def special_ids(self) -> dict[str, int]:
        """What the config says of special tokens, for a tokenizer that does not."""
        found: dict[str, int] = {}
        for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            value = self.config.get(f"{key}_token_id")
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int) and first >= 0:
                found[f"tokenizer.ggml.{name}_token_id"] = first
        return found

    def rope_divisors(self) -> np.ndarray | None:
        """What each frequency is divided by, for a scaling that GGUF holds as a tensor."""
        if self.scaling["rope_type"] != "llama3":
            return None
        named = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        setting = (self._scale(key) for key in named)
        divisors = llama3_divisors(self.theta, self.head_dim, self._scale("factor"), *setting)
        return divisors.astype(np.float32)

    def _rope(self) -> tuple[float, dict[str, Any]]:
        """The base of the (global) frequencies and their scaling, of either spelling."""
        given = self.config.get("rope_parameters") or {}
        main = given.get("full_attention", given)
        scaling = {**(self.config.get("rope_scaling") or {}), **main}
        theta = float(scaling.pop("rope_theta", None) or self.config.get("rope_theta") or 1e4)
        scaling["rope_type"] = kind = scaling.pop("type", scaling.get("rope_type", "default"))
        if kind not in _SCALINGS or given.get("sliding_attention", {}).get("factor"):
            raise self.unsaid("rope_parameters", given or scaling)
        extra = scaling.keys() - _SCALINGS[kind] - {"rope_type", "truncate"}
        if any(scaling[key] is not None for key in extra) or scaling.get("truncate") is False:
            raise self.unsaid("rope_parameters", given or scaling)
        return theta, scaling

    def _scale(self, key: str) -> Any:
        found = self.scaling.get(key)
        if found is None and key == "original_max_position_embeddings":
            return self.need("max_position_embeddings")
        if found is None:
            raise CheckpointError(f"RoPE scaling {self.scaling} does not say {key}.")
        return found

    def _scaling_keys(self) -> dict[str, Any]:
        kind, keys = self.scaling["rope_type"], {}
        if kind in ("yarn", "llama3"):
            original = self._scale("original_max_position_embeddings")
            keys["rope.scaling.original_context_length"] = original
        if kind in ("linear", "yarn"):
            keys["rope.scaling.type"] = kind
            keys["rope.scaling.factor"] = float(self._scale("factor"))
        for key in ("beta_fast", "beta_slow"):
            if kind == "yarn" and self.scaling.get(key) is not None:
                keys[f"rope.scaling.yarn_{key}"] = float(self.scaling[key])
        return keys

    def _gemma3(self) -> dict[str, Any]:
        config = self.config
        big = self.layers == GEMMA3_27B_LAYERS
        width = self.hidden // self.heads if big else self.head_dim
        if self.need("query_pre_attn_scalar") != width:
            raise self.unsaid("query_pre_attn_scalar", config["query_pre_attn_scalar"])
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
        base = local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4
        said: dict[str, Any] = {
            "attention.sliding_window": self.need("sliding_window"),
            "rope.freq_base_swa": float(base),
        }
        if (period := self._period()) != USUAL_PERIOD:
            said["attention.sliding_window_pattern"] = period
        if config.get("final_logit_softcapping") is not None:
            said["final_logit_softcapping"] = float(config["final_logit_softcapping"])
        return said

    def _period(self) -> int:
        """Every how many layers one looks at everything."""
        full = [kind == "full_attention" for kind in self.need("layer_types")]
        for period in (USUAL_PERIOD, *range(1, len(full) + 1)):
            if full == [(i + 1) % period == 0 for i in range(len(full))]:
                return period
        raise self.unsaid("layer_types", self.config["layer_types"])
