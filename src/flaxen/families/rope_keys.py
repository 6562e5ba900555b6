"""The RoPE settings of a config.json, in the keys of Transformers 5 (`rope_parameters`), in those
of Transformers 4 (`rope_theta`, `rope_scaling` and others), or in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.layers.rope_fields import named, same_type

LENGTH = "original_max_position_embeddings"
"""The length of pretraining."""

FULL, SLIDING = "full_attention", "sliding_attention"

_OLDER = {
    "rope_theta": (FULL, "rope_theta"),
    "global_rope_theta": (FULL, "rope_theta"),
    "rotary_emb_base": (FULL, "rope_theta"),
    "rope_local_base_freq": (SLIDING, "rope_theta"),
    "local_rope_theta": (SLIDING, "rope_theta"),
    "partial_rotary_factor": (FULL, "partial_rotary_factor"),
    "rotary_pct": (FULL, "partial_rotary_factor"),
    LENGTH: (FULL, LENGTH),
}
"""Older keys at the top level: which layers they speak of, and their name today."""

_OWN_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "modernbert": {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
}
"""Model types whose older keys have names of their own."""

_LONGER = ("llama3", "yarn", "longrope")
"""Types that count from the length of pretraining."""


def one_spelling(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the same RoPE settings, such that every config class of Transformers 5
    reads them all.

    Its classes take `rope_scaling` instead of `rope_parameters` where both are given, theta and
    all; here the two are one. They look up the length of pretraining at the top level later than
    they need it; here it is in its place. "su" is what LongRoPE was called at first.

    Raises:
        ConfigError: naming the key and both values where old and new keys contradict each other.
    """
    raw = _of_both_kinds(raw) if raw.get("model_type") == "olmo3" else raw
    new, old = _settings(raw, "rope_parameters"), _settings(raw, "rope_scaling")
    given = new or old
    if not given:
        return dict(raw)
    for layers, key, value in _older_values(raw, old if new else {}):
        found = _of_layers(given, layers).get(key)
        agree = key == "rope_type" and same_type(value, found)
        if None not in (found, value) and found != value and not agree:
            raise ConfigError(
                f"config.json says {key}={value!r} in its older keys and {found!r} in "
                f"{'rope_parameters' if new else 'rope_scaling'}. Remove the wrong one."
            )
    main = _of_layers(given, FULL)
    main.update({key: value for key, value in old.items() if main.get(key) is None})
    out = {k: v for k, v in raw.items() if k != "rope_scaling"}
    out["rope_parameters" if new else "rope_scaling"] = given
    if not _is_nested(given) and main.get("rope_type") in _LONGER:
        length = raw.get(LENGTH) or main.get(LENGTH)
        main |= {LENGTH: length} if length else {}
        if length and raw.get("model_type") == "phi3":  # its class has a default, which would win
            out[LENGTH] = length
    return out


def _of_both_kinds(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """OLMo 3's class gives an older `rope_theta` to the layers without a window alone; it was meant
    for all, and `rope_scaling` for those.
    """
    theta = raw.get("rope_theta")
    if theta is None or raw.get("rope_parameters"):
        return raw
    base = {"rope_type": "default", "rope_theta": theta}
    both = {FULL: base | _settings(raw, "rope_scaling"), SLIDING: base}
    rest = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}
    return {**rest, "rope_parameters": both}


def both_spellings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that Transformers 4 and 5 read alike: RoPE settings stand in the older keys
    too.
    """
    new, old = _settings(raw, "rope_parameters"), _settings(raw, "rope_scaling")
    if not new:
        renamed = {key: old[key] for key in raw.get("rope_scaling") or ()}
        return {**raw, "rope_scaling": renamed} if renamed else dict(raw)
    main = dict(_of_layers(new, FULL))
    older = {"rope_theta": main.pop("rope_theta", None)}
    if _is_nested(new):
        older["rope_local_base_freq"] = _of_layers(new, SLIDING).get("rope_theta")
    else:
        older["partial_rotary_factor"] = main.pop("partial_rotary_factor", None)
    if main.get("rope_type") == "longrope":
        older[LENGTH] = main.get(LENGTH)
    own = _OWN_NAMES.get(str(raw.get("model_type")), {})
    out = {**raw, "rope_parameters": new}
    out |= {own.get(key, key): value for key, value in older.items() if value is not None}
    if main.keys() - {"type", "rope_type"} or main.get("rope_type", "default") != "default":
        out["rope_scaling"] = _scaling(main, raw.get("model_type"))
    return out


def check_layers(settings: Any) -> None:
    """Settings of single kinds of layers and settings of all: no config class reads both.

    Raises:
        ConfigError: naming them.
    """
    if not isinstance(settings, Mapping) or not _is_nested(settings):
        return
    some = [f"{k}={v!r}" for k, v in settings.items() if isinstance(v, Mapping)]
    every = [f"{k}={v!r}" for k, v in settings.items() if not isinstance(v, Mapping | None)]
    if every:
        raise ConfigError(
            f"rope_parameters say {', '.join(every)} for all layers and {', '.join(some)} for "
            "single kinds of them. This model reads one of the two: keep that one."
        )


def _scaling(main: dict[str, Any], model_type: Any) -> dict[str, Any]:
    """One type's settings as Transformers 4 expects them."""
    if main.get("mrope_section") and main.get("rope_type") == "default":
        return {**main, "type": "mrope"}
    factors = ("short_factor", "long_factor")
    rest = main.keys() - {*factors, "type", "rope_type", LENGTH}
    if model_type == "phi3" and main.get("rope_type") == "longrope" and not rest:
        # Its config class wants these three fields and no other.
        return {"type": "longrope", **{key: main[key] for key in factors}}
    return main


def _settings(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of one of the two objects, each type in it under `rope_type`."""
    found = raw.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"config.json says {name}={found!r}; expected an object such as "
            '{"rope_type": "linear", "factor": 2.0}.'
        )
    if _is_nested(found):
        return {k: named(v) if isinstance(v, Mapping) else v for k, v in found.items()}
    fields = named(found)
    if "factor" in fields and fields.get("rope_type") is None:
        raise ConfigError(
            f"config.json says {name}={found!r}, a factor without the rope_type that it belongs "
            'to. Add one, such as "linear".'
        )
    return fields


def _is_nested(settings: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in settings.values())


def _of_layers(settings: dict[str, Any], layers: str) -> dict[str, Any]:
    """The settings of one kind of layers, which may be those of all."""
    if not _is_nested(settings):
        return settings
    return settings[layers] if isinstance(settings.get(layers), dict) else {}


def _older_values(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for old, (layers, key) in _OLDER.items():
        yield layers, key, raw.get(old)
    for key, value in scaling.items():
        if key != "type":
            yield FULL, key, value
