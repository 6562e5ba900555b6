"""From a config.json to a Hugging Face config object and an abstract model, and back to a file."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.hugging_face import transformers
from flaxen.families import find
from flaxen.families.family import Family, Reading
from flaxen.families.rope_keys import check_layers, one_spelling
from flaxen.families.tasks import with_head

COUNTED = re.compile(r"layers?$|experts$")
SIZE = re.compile(r"vocab_size|hidden_size|n_embd|d_model|n_head|num_(attention|key_value)_heads")
"""Sizes without which there is no model."""
MOST = 2048
"""Layers or experts of a model."""


def hf_config(raw: Mapping[str, Any]) -> Any:
    """The `transformers` config object of a config.json, of either generation of RoPE keys.

    Raises:
        ConfigError: for an unknown family, keys that contradict each other, or values that the
        config class refuses.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json has no model_type; found the keys {sorted(raw)[:8]}.")
    find(model_type)
    classes = raw.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(f"config.json says architectures={classes!r}; expected a list of names.")
    raw = untagged(raw)
    check_numbers(raw)
    check_counts(raw)
    fields = {k: v for k, v in one_spelling(raw).items() if k != "model_type"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers().CONFIG_MAPPING[model_type](**fields)
            config.to_dict()  # fails on some values that the class lets through
    except Exception as error:  # the class's own checks raise many kinds
        text = " ".join(str(error).split())
        raise ConfigError(
            f"config.json of this {model_type} model is not usable: {text}"
        ) from error
    check_layers(getattr(config, "rope_parameters", None))
    return config


def untagged(value: Any) -> Any:
    """JSON knows no infinity: `{"__float__": "Infinity"}`, as Transformers writes it, is one."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: untagged(each) for key, each in value.items()}
    return [untagged(each) for each in value] if isinstance(value, list) else value


def check_numbers(raw: Mapping[str, Any]) -> None:
    """NaN in a config would make every result NaN.

    Raises:
        ConfigError: naming the keys.
    """
    bad = [key for key, value in raw.items() if isinstance(value, float) and math.isnan(value)]
    if bad:
        raise ConfigError(f"config.json says NaN for {', '.join(bad)}; expected numbers.")


def check_counts(raw: Mapping[str, Any]) -> None:
    """Each layer and each expert has names of its own: with an absurd number of them, writing the
    names down would not end. Of what is multiplied or divided by there has to be one at least.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in raw.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif SIZE.fullmatch(key) and type(value) is int and value < 1:
            raise ConfigError(f"config.json says {key}={value}; expected 1 or more.")
        elif COUNTED.search(key) and type(value) is int and value > MOST:
            raise ConfigError(f"config.json says {key}={value}; expected at most {MOST}.")


def abstract_module(config: Any) -> tuple[Any, Family, Reading]:
    """The abstract model of a config, its family, and what was read of the config.

    Raises:
        ConfigError: when a declared key that differs from its default was not read, since the
        numbers would be wrong.
    """
    family, reading = find(config.model_type), Reading(config)
    module = with_head(family.build(reading), config)
    overlooked = reading.unread_known()
    if overlooked:
        listed = ", ".join(f"{k}={v!r}" for k, v in overlooked.items())
        raise ConfigError(
            f"The {config.model_type} family does not handle {listed}: its numbers would be wrong. "
            "Set these to their defaults if that is meant."
        )
    return module, family, reading
