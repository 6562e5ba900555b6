"""The Hugging Face config of a GGUF file, from its metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.convert.formats.gguf_names import ROPE_FACTORS
from flaxen.core.errors import CheckpointError, did_you_mean

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Tokens that end an assistant's turn, for files that name only the end of a text.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
CONTROL = 3
GEMMA3_27B_LAYERS = 62


class GgufConfig:
    """Reads the metadata of one architecture.

    Raises CheckpointError for what cannot be followed exactly.
    """

    def __init__(self, file: GgufFile):
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.architecture!r} cannot be read from GGUF."
                f"{did_you_mean(self.architecture, ARCHITECTURES)}"
            )
        # A file that was merged again says 0.
        if (parts := self.one("split.count", 1)) not in (0, 1):
            raise CheckpointError(
                f"{file.path}: one of {parts} parts of a model. "
                "Merge them first (llama-gguf-split --merge)."
            )
        if self.get("expert_count", 0):
            raise CheckpointError(f"{file.path}: mixtures of experts cannot be read from GGUF.")
        self.layers = self.number("block_count")
        self.hidden = self.number("embedding_length")
        self.heads = self.number("attention.head_count")
        self.kv_heads = self.number("attention.head_count_kv", self.heads)
        self.head_dim = self._head_dim()

    def one(self, key: str, default: Any = None) -> Any:
        """A value that may not be a list."""
        found = self.file.metadata.get(key, default)
        if isinstance(found, list | np.ndarray):
            raise self.wrong(key, found, "one value")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        return self.one(f"{self.architecture}.{key}", default)

    def wrong(self, key: str, found: Any, expected: str) -> CheckpointError:
        said = repr(found) if len(repr(found)) < 100 else f"{repr(found)[:100]}..."
        return CheckpointError(f"{self.file.path}: {key} is {said}; expected {expected}.")

    def number(self, key: str, default: int | None = None) -> int:
        """A count, also where the file lists the same one for every layer."""
        key = f"{self.architecture}.{key}"
        found = self.file.metadata.get(key, default)
        values = found.tolist() if isinstance(found, np.ndarray) else [found]
        if not values or values.count(values[0]) != len(values):
            raise self.wrong(key, found, "one positive number")
        if type(values[0]) is not int or values[0] <= 0:
            raise self.wrong(key, found, "one positive number")
        return values[0]

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that is this float32."""
        found = self.get(key, default)
        if not isinstance(found, int | float) or not found > 0:
            raise self.wrong(f"{self.architecture}.{key}", found, "a positive number")
        return _shortest(found)

    def _head_dim(self) -> int:
        size = self.number("attention.key_length", self.hidden // self.heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, size) != size:
                raise CheckpointError(
                    f"{self.file.path}: {self.architecture}.{key} is {self.get(key)}, but a head "
                    f"has {size} channels; only heads that rotate whole, and have keys as wide as "
                    "values, can be read."
                )
        return size

    def config(self, dtype: str) -> dict[str, Any]:
        """What would stand in config.json."""
        windowed = self.architecture == "llama" and self.get("attention.sliding_window")
        kind = {"gemma3": "gemma3_text", "llama": "mistral" if windowed else "llama"}
        model_type = kind.get(self.architecture, self.architecture)
        common = {
            "architectures": [CLASSES[model_type]],
            "model_type": model_type,
            "dtype": dtype,
            "vocab_size": self.file.tensors["token_embd.weight"].shape[0],
            "hidden_size": self.hidden,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.number("context_length"),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            **self.special_ids(),
        }
        return common | self._particular(model_type)

    def _particular(self, model_type: str) -> dict[str, Any]:
        if model_type == "gemma3_text":
            return self._gemma3()
        own: dict[str, Any] = {"hidden_act": "silu"}
        if model_type != "qwen2" or self.head_dim * self.heads != self.hidden:
            own["head_dim"] = self.head_dim
        if model_type == "mistral":
            own["sliding_window"] = self.number("attention.sliding_window")
        if model_type in ("llama", "qwen3"):
            own["attention_bias"] = self._has("attn_q.bias")
        if model_type == "llama":
            own["mlp_bias"] = self._has("ffn_gate.bias")
        return own

    def _gemma3(self) -> dict[str, Any]:
        period = self.number("attention.sliding_window_pattern", 6)
        # Only the 27B scales queries by the width of the residual stream; the file does not say so.
        scalar = self.hidden // self.heads if self.layers == GEMMA3_27B_LAYERS else self.head_dim
        return {
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.number("attention.sliding_window"),
            "layer_types": [
                "sliding_attention" if (i + 1) % period else "full_attention"
                for i in range(self.layers)
            ],
            "attention_bias": False,
            "attn_logit_softcapping": self.get("attn_logit_softcapping"),
            "final_logit_softcapping": self.get("final_logit_softcapping"),
        }

    def _has(self, part: str) -> bool:
        return f"blk.0.{part}" in self.file.tensors

    def _rope(self) -> dict[str, Any]:
        if self.architecture != "gemma3":
            return {"rope_theta": self.real("rope.freq_base", 1e4), **self._scaling()}
        theta, local = self.real("rope.freq_base", 1e6), self.real("rope.freq_base_swa", 1e4)
        return {
            "full_attention": {"rope_theta": theta, **self._scaling()},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }

    def _scaling(self) -> dict[str, Any]:
        # Files older than the type's key scale linearly by another key.
        old = self.get("rope.scale_linear")
        kind = self.get("rope.scaling.type", "none" if old is None else "linear")
        odd = [k for k in _UNSAID if self.get(f"rope.scaling.{k}", 1.0) != 1.0]
        odd += [name for name in self.file.tensors if name.startswith("rope_factors_")]
        if odd or kind not in ("none", "linear", "yarn"):
            raise CheckpointError(
                f"{self.file.path}: rotary scaling {kind!r} {odd or ''} cannot be said in a "
                "Hugging Face config."
            )
        if ROPE_FACTORS in self.file.tensors:
            return self._llama3()
        if kind == "yarn":
            return self._yarn()
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.real("rope.scaling.factor", old)}
        return {"rope_type": "default"}

    def _yarn(self) -> dict[str, Any]:
        said = {
            "rope_type": "yarn",
            "factor": self.real("rope.scaling.factor"),
            "original_max_position_embeddings": self.number("rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if self.get(f"rope.scaling.yarn_{name}") is not None:
                said[name] = self.real(f"rope.scaling.yarn_{name}")
        return said

    def _llama3(self) -> dict[str, Any]:
        """Llama 3's scaling: the file has only its divisors, so they must be of its one setting."""
        entry = self.file.tensors[ROPE_FACTORS]
        stored = np.frombuffer(self.file.buffer, np.float32, entry.bytes // 4, entry.start)
        factor = _shortest(float(stored.max(initial=1.0)))
        if factor == 1.0:
            return {"rope_type": "default"}
        theta = self.real("rope.freq_base", 1e4)
        if stored.size * 2 != self.head_dim or not np.allclose(
            stored, llama3_divisors(theta, self.head_dim, factor), rtol=1e-4
        ):
            raise CheckpointError(
                f"{self.file.path}: {ROPE_FACTORS} does not hold the divisors of Llama 3's scaling "
                f"by {factor}, and nothing else about them is known."
            )
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}

    def special_ids(self) -> dict[str, int]:
        """bos, eos and pad ids, as far as the file names them."""
        named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {k: self._token_id(f"{v}_token_id") for k, v in named.items()}
        return {k: v for k, v in found.items() if v is not None}

    def _token_id(self, key: str) -> int | None:
        key = f"tokenizer.ggml.{key}"
        found = self.one(key)
        if found is not None and type(found) is not int:
            raise self.wrong(key, found, "the number of a token")
        return found

    def generation_config(self) -> dict[str, Any]:
        """What would stand in generation_config.json: with every token that ends an answer."""
        ends = [self._token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        tokens = self._list("tokenizer.ggml.tokens", list)
        kinds = self._list("tokenizer.ggml.token_type", np.ndarray)
        ends += [
            i
            for i in np.flatnonzero(np.asarray(kinds) == CONTROL).tolist()
            if i < len(tokens) and isinstance(tokens[i], str) and tokens[i] in ENDS_OF_TURN
        ]
        unique = list(dict.fromkeys(i for i in ends if i is not None))
        eos = {"eos_token_id": unique[0] if len(unique) == 1 else unique} if unique else {}
        return {**self.special_ids(), **eos}

    def _list(self, key: str, kind: type) -> Any:
        found = self.file.metadata.get(key, _NOTHING[kind])
        if not isinstance(found, kind):
            raise self.wrong(key, found, "a list with an item for each token")
        return found


_NOTHING: dict[type, Any] = {list: [], np.ndarray: np.zeros(0)}
_UNSAID = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "alpha")
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by, at its published setting."""
    low, high, length = LLAMA3.values()
    turns = length * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
