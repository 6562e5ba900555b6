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

COUNTED = re.compile(r"layers?$|experts$")
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
    check_numbers(raw)
    check_counts(raw)
    check_rope(raw)
    fields = {k: v for k, v in raw.items() if k != "model_type"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers().CONFIG_MAPPING[model_type](**fields)
            config.to_dict()  # fails on some values that the class lets through
            return config
    except Exception as error:  # the class's own checks raise many kinds
        text = " ".join(str(error).split())
        raise ConfigError(
            f"config.json of this {model_type} model is not usable: {text}"
        ) from error


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
    names down would not end.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in raw.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif COUNTED.search(key) and type(value) is int and value > MOST:
            raise ConfigError(f"config.json says {key}={value}; expected at most {MOST}.")


def check_rope(raw: Mapping[str, Any]) -> None:
    """Both spellings of RoPE settings may stand in a file, if they agree.

    Raises:
        ConfigError: naming the key and both values.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, Mapping):
            raise ConfigError(
                f"config.json says {name}={raw[name]!r}; expected an object such as "
                '{"rope_type": "linear", "factor": 2.0}.'
            )
    new = raw.get("rope_parameters")
    old = dict(raw.get("rope_scaling") or {})
    if not new:
        return
    old = {("rope_type" if k == "type" else k): v for k, v in old.items()}
    for key, legacy, kind in (
        ("rope_theta", raw.get("rope_theta"), "full_attention"),
        ("rope_theta", raw.get("rope_local_base_freq"), "sliding_attention"),
        *((k, v, "full_attention") for k, v in old.items()),
    ):
        given = new.get(kind, new) if isinstance(new.get(kind, new), dict) else {}
        if legacy is not None and given.get(key) is not None and given[key] != legacy:
            raise ConfigError(
                f"config.json says {key}={legacy!r} in its older keys and {given[key]!r} in "
                "rope_parameters. "
                "Remove the wrong one."
            )


def both_spellings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that Transformers 4 and 5 read alike: RoPE settings stand in the older keys
    too.
    """
    out, rope = dict(raw), raw.get("rope_parameters")
    if not rope or not isinstance(rope, Mapping):
        return out
    nested = isinstance(rope.get("full_attention"), Mapping)
    main = dict(rope["full_attention"] if nested else rope)
    if main.get("rope_theta") is not None:
        out["rope_theta"] = main.pop("rope_theta")
    if nested and isinstance(rope.get("sliding_attention"), Mapping):
        out["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    if main.get("rope_type", "default") != "default":
        out["rope_scaling"] = main
    return out


def abstract_module(config: Any) -> tuple[Any, Family, Reading]:
    """The abstract model of a config, its family, and what was read of the config.

    Raises:
        ConfigError: when a declared key that differs from its default was not read, since the
        numbers would be wrong.
    """
    family, reading = find(config.model_type), Reading(config)
    module = family.build(reading)
    overlooked = reading.unread_known()
    if overlooked:
        listed = ", ".join(f"{k}={v!r}" for k, v in overlooked.items())
        raise ConfigError(
            f"The {config.model_type} family does not handle {listed}: its numbers would be wrong. "
            "Set these to their defaults if that is meant."
        )
    return module, family, reading
