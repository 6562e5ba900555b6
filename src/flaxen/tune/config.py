"""adapter_config.json: what of it is followed, and what is refused.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flaxen.convert.formats.checkpoint import open_checkpoint, read_json
from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.tune.leaf import scale_of
from flaxen.tune.targets import pattern_value

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."

ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Keys of the config that change what an adapter computes, and the values we can follow."""

WHY = {
    "target_parameters": "adapters of a mixture's experts",
    "init_lora_weights": "an adapter of a base whose weights were changed at its start; PEFT's "
    "save_pretrained(path_initial_model_for_weight_conversion=...) makes a plain one of it",
}

NUMBERS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("r", lambda x: type(x) is int and 0 < x < 2**31, "a whole number of 1 or more"),
    ("lora_alpha", lambda x: type(x) in (int, float) and abs(x) < 1e30, "a number"),
    ("use_rslora", lambda x: x in (None, True, False), "true or false"),
    ("use_dora", lambda x: x in (None, True, False), "true or false"),
    ("rank_pattern", lambda x: _pattern(x, lambda r: type(r) is int and r > 0), "ranks by name"),
    ("alpha_pattern", lambda x: _pattern(x, lambda a: type(a) in (int, float)), "numbers by name"),
    ("lora_dropout", lambda x: x is None or (type(x) in (int, float) and 0 <= x < 1), "a rate"),
]
"""What the scale of an adapter is made of."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What a config says that is followed; tensors say which modules are adapted."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank(self, module: str) -> int:
        return pattern_value(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        alpha = pattern_value(self.alpha_pattern, module, self.lora_alpha)
        return scale_of(self.rank(module), alpha, self.use_rslora)


def read_config(file: Path) -> Config:
    """
    Raises:
        ConfigError: it asks for something that is not followed, or says what makes no sense.
    """
    config = read_json(file)
    wrong = [key for key, good in ONLY.items() if config.get(key, good[0]) not in good]
    if wrong:
        asked = ", ".join(
            f"{k}={config[k]!r}" + (f" ({WHY[k]})" if k in WHY else "") for k in wrong
        )
        raise ConfigError(
            f"{file} asks for {asked}, which is not supported. "
            "Merge that adapter with the library that made it, and load the merged model."
        )
    for key, fits, words in NUMBERS:
        if not fits(config.get(key)):
            raise ConfigError(f"{file} says {key}={config.get(key)!r}; expected {words}.")
    return Config(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        lora_dropout=config.get("lora_dropout") or 0.0,
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
    )


def read_adapter(folder: Path) -> tuple[Config, dict[str, LazyTensor]]:
    """The config of an adapter folder, and its tensors without the prefix that all have.

    Raises:
        CheckpointError: files that are absent or damaged.
        ConfigError: as `read_config`.
    """
    weights = next((n for n in (WEIGHTS, PICKLED) if (folder / n).is_file()), None)
    if weights is None or not (folder / CONFIG).is_file():
        absent = CONFIG if not (folder / CONFIG).is_file() else WEIGHTS
        raise CheckpointError(
            f"{folder / absent} is not there; an adapter folder has {CONFIG} and {WEIGHTS}."
        )
    config = read_config(folder / CONFIG)
    return config, {k.removeprefix(PREFIX): x for k, x in open_checkpoint(folder / weights).items()}


def _pattern(value: Any, fits: Callable[[Any], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(map(fits, value.values()))
