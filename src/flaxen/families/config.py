"""From a config.json to a Hugging Face config object and an abstract model, and back to a file."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.hugging_face import transformers
from flaxen.core.tree import is_param, paths
from flaxen.families import find
from flaxen.families.family import Family, Reading
from flaxen.families.rope_keys import check_layers, one_spelling
from flaxen.families.tasks import with_head

BOUNDS = (
    (re.compile(r"(|.*_)(n|num|encoder|decoder)(|_.*)_layers?|depth"), 0, 2048),
    (re.compile(r".*(layers?|experts)"), None, 2048),
    (re.compile(r".*heads?|num_kv_heads|num_key_value_heads"), 1, 2**16),
    (re.compile(r"hidden_size|n_embd|d_model|d_kv|(|.*_)dim"), 1, 2**24),
    (re.compile(r"(|.*_)((chunk|block|window|patch|merge|state)_size|groups?|rank)"), 1, None),
    (re.compile(r"(|.*_)intermediate_size"), 0, None),
    (re.compile(r"vocab_size"), 1, None),
    (re.compile(r"num_labels"), None, 2**20),
    (re.compile(r"num_experts_per_tok|.*_kernel(_dim|_size)?|.*_d_conv"), 1, None),
    (re.compile(r"(|.*_)(dropout(|_prob|_p|_rate)|pdrop)"), 0, 1),
    (re.compile(r".*eps(ilon)?"), 0, None),
)
"""Numbers that a model can have of what is counted: each layer, expert and label has a name, each
head a slope, each channel of a head a frequency. The first pattern that is a whole key decides.
Sizes of parts that may be absent can be 0.
"""


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
    """With an absurd number of layers or heads, writing down what belongs to each would not end; of
    what is multiplied or divided by there has to be one at least.

    Raises:
        ConfigError: naming the key.
    """
    for key, value in raw.items():
        if isinstance(value, Mapping):
            check_counts(value)
            continue
        if type(value) not in (int, float) or not isinstance(key, str):
            continue
        least, most = next(((a, b) for name, a, b in BOUNDS if name.fullmatch(key)), (None, None))
        if least is not None and value < least:
            raise ConfigError(f"config.json says {key}={value}; expected {least} or more.")
        if most is not None and value > most:
            raise ConfigError(f"config.json says {key}={value}; expected at most {most}.")


def abstract_module(config: Any) -> tuple[Any, Family, Reading]:
    """The abstract model of a config, its family, and what was read of the config.

    Raises:
        ConfigError: when a declared key that differs from its default was not read, since the
        numbers would be wrong.
    """
    family, reading = find(config.model_type), Reading(config)
    module = with_head(built(family, reading), config)
    overlooked = reading.unread_known()
    if overlooked:
        listed = ", ".join(f"{k}={v!r}" for k, v in overlooked.items())
        raise ConfigError(
            f"The {config.model_type} family does not handle {listed}: its numbers would be wrong. "
            "Set these to their defaults if that is meant."
        )
    return module, family, reading


def built(family: Family, config: Reading) -> Any:
    """The abstract model of a config.

    Raises:
        ConfigError: also where a value is of another kind or size than the family counts with, such
        as null for a width. It is among those that were read last.
    """
    try:
        module = family.build(config)
        for path, weight in paths(module, is_param).items():
            if not all(type(n) is int and n > 0 for n in weight.axes.values()):
                sizes = ", ".join(f"{n} {axis}" for axis, n in weight.axes.items())
                raise ValueError(f"{path} would have {sizes}")
        return module
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        last = ", ".join(f"{key}={value!r}" for key, value in config.recent)
        raise ConfigError(
            f"No {config.model_type} model can be built of this config.json: {error}. Read last "
            f"were {last}."
        ) from error


def described(config: Any, module: Any) -> tuple[Any, Family]:
    """The abstract model that a live module is of, and its family: with a head of its own where
    the module has one although its config does not say so.
    """
    abstract, family, _ = abstract_module(config)
    apart = abstract.untied()
    return (apart if apart is not None and apart.ties() == module.ties() else abstract), family
