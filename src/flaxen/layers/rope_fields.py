"""What stands in `rope_parameters`: which fields a type needs, may have, and does not know."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.layers.rope_types import ROPE_TYPES

_LISTS = ("short_factor", "long_factor")
_NEEDED = {
    "default": (),
    "axial": (),
    "mrope": ("mrope_section",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": (*_LISTS, "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
    "proportional": ("factor",),
}
_ALWAYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}
_SAYS_NOTHING = {"finetuned", "max_position_embeddings"}
"""Found in files, read by no type."""

_NO_NUMBERS = {*_LISTS, "truncate", "mrope_section"}
_ZERO_IS_DEFAULT = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}

_SAME = (("su", "longrope"), ("yarn", "longrope"), ("mrope", "default"))


def same_type(old: Any, new: Any) -> bool:
    """Whether an older name of a type may stand beside a newer one: both are found in files."""
    return old == new or (old, new) in _SAME


def named(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one type with its name under `rope_type`. Older files say `type`, "su" for
    longrope, and "mrope" for default frequencies in sections.

    Raises:
        ConfigError: where both keys stand there and contradict each other.
    """
    fields = dict(parameters)
    old, new = fields.get("type"), fields.get("rope_type")
    if None not in (old, new) and not same_type(old, new):
        raise ConfigError(
            f"rope_parameters say type={old!r} and rope_type={new!r}. Remove the wrong one."
        )
    fields |= {key: "longrope" for key in ("type", "rope_type") if fields.get(key) == "su"}
    if new is None and old is not None:
        sections = old == "mrope" and fields.get("mrope_section")
        fields["rope_type"] = "default" if sections else fields["type"]
    return fields


def layer_fields(parameters: Any, layer_type: str) -> Mapping[str, Any] | None:
    """The parameters of one layer type: nested ones, or those that hold for all; None for null."""
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    if not nested and layer_type not in parameters:
        return parameters
    if layer_type not in parameters:
        raise ConfigError(
            f"rope_parameters have no entry for {layer_type!r} layers; found "
            f"{', '.join(sorted(parameters))}. Add one, or null if these layers do not rotate."
        )
    found = parameters[layer_type]
    # Transformers looks for `truncate` outside of the layer types only, so there it never counts.
    return found and {key: value for key, value in found.items() if key != "truncate"}


def read_fields(parameters: Mapping[str, Any], head_dim: int) -> tuple[int, dict[str, Any]]:
    """How many channels of a head turn, and the fields of one type, checked.

    Raises:
        ConfigError: see `flaxen.layers.rope.rope`.
    """
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in named(parameters).items()}
    kind = fields.setdefault("rope_type", "default")
    if not isinstance(kind, str):
        raise ConfigError(f"Unknown rope_type {kind!r}; expected a name such as 'default'.")
    ROPE_TYPES[kind]
    _check_names(kind, fields)
    _check_values(kind, fields)
    dim = _channels(kind, fields, head_dim)
    _check_lists(fields, dim)
    return dim, fields


def _check_names(kind: str, fields: Mapping[str, Any]) -> None:
    needed = ("rope_theta", *_NEEDED.get(kind, ()))
    missing = [f for f in needed if fields.get(f) is None]
    if kind == "yarn" and "factor" in fields:  # null: by how much the length grew
        missing = [f for f in missing if f != "factor"]
    if missing:
        raise ConfigError(
            f"rope_parameters of type {kind!r} lacks {', '.join(missing)}; found {dict(fields)}."
        )
    if kind not in _NEEDED:  # a registered type knows its own fields
        return
    unread = fields.keys() - _ALWAYS - _SAYS_NOTHING - {*needed, *_OPTIONAL.get(kind, ())}
    known = {f for names in (*_NEEDED.values(), *_OPTIONAL.values()) for f in names}
    for field in sorted(unread - known):
        raise ConfigError(
            f"rope_parameters of type {kind!r} says {field}={fields[field]!r}, which nothing "
            f"reads.{did_you_mean(field, known | _ALWAYS)} Remove it if it means nothing."
        )
    if unread:
        warnings.warn(
            f"rope_parameters of type {kind!r} do not use {', '.join(sorted(unread))}.",
            stacklevel=4,
        )


def _check_values(kind: str, fields: Mapping[str, Any]) -> None:
    read = {"rope_theta", *_NEEDED.get(kind, ()), *_OPTIONAL.get(kind, ())} - _NO_NUMBERS
    bad = {
        f: fields[f]
        for f in sorted(read)
        if fields.get(f) is not None
        and not _positive(fields[f])
        and not (f in _ZERO_IS_DEFAULT and fields[f] == 0)
    }
    if bad:
        listed = ", ".join(f"{f}={x!r}" for f, x in bad.items())
        raise ConfigError(
            f"rope_parameters of type {kind!r} says {listed}; expected numbers above 0."
        )


def _channels(kind: str, fields: Mapping[str, Any], head_dim: int) -> int:
    part = fields.get("partial_rotary_factor")
    part = 1.0 if part is None else part
    if type(part) not in (int, float) or not 0 <= part <= 1:
        raise ConfigError(f"partial_rotary_factor is {part!r}; expected a number from 0 to 1.")
    whole = kind in ("proportional", "axial")
    dim = head_dim if whole else int(head_dim * part)
    if dim < (3 if kind == "dynamic" else 1) or dim + dim % 2 > head_dim:
        raise ConfigError(
            f"{dim} of {head_dim} channels would turn with rope type {kind!r}; they turn in pairs, "
            "so head_dim must be even, and a type whose base grows needs more than one pair."
        )
    if kind == "axial" and dim % 4:
        raise ConfigError(
            f"head_dim is {dim}; rows and columns each turn half of it, in pairs: expected a "
            "multiple of 4."
        )
    return dim


def _check_lists(fields: Mapping[str, Any], dim: int) -> None:
    pairs = (dim + 1) // 2
    for f in _LISTS if fields["rope_type"] == "longrope" else ():
        if not isinstance(fields[f], tuple) or not all(map(_positive, fields[f])):
            raise ConfigError(f"{f} is {fields[f]!r}; expected a list of numbers above 0.")
        if len(fields[f]) != pairs:
            raise ConfigError(f"{f} has {len(fields[f])} numbers; {dim} channels need {pairs}.")
    sections = fields.get("mrope_section")
    if sections is None:
        return
    counts = isinstance(sections, tuple) and all(type(x) is int and x >= 0 for x in sections)
    if not counts or len(sections) != 3 or sum(sections) != pairs:
        raise ConfigError(
            f"mrope_section is {sections!r}; expected how many of the {pairs} pairs turn with "
            "time, row and column."
        )


def _positive(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf
