"""Which weights of a model are rounded, and how."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.place import place
from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.tree import paths, rebuild
from flaxen.layers.linear import Embedding, Linear
from flaxen.layers.moe import Projections
from flaxen.layers.routers import Router
from flaxen.models.fold import in_body, plain_paths
from flaxen.quantize.fp8 import KEPT
from flaxen.quantize.leaf import QuantizedWeight
from flaxen.quantize.normal_float import NormalFloat
from flaxen.quantize.rounded import RoundedWeight, rounded_weight
from flaxen.quantize.rounded_tensors import rounded_parts
from flaxen.quantize.rounding import Rounding

Rules = int | str | Rounding | Mapping[str, int | str | Rounding | None]
"""How all projections are rounded: bits, "nf4" or a `Rounding`; or for each expression that may be
found in a path, how weights are (None: not at all), the first that is found counts.
"""

NF4 = "nf4"

MODULES = (Linear, Embedding, Projections, Router)


class Site(NamedTuple):
    """A matrix that may be rounded.

    names: its path, or in a folded model those of the layers that are stacked in it. shape: its
    weight's. lead: axes of layers and experts. contract: how many of the last axes are inputs.
    usual: whether it is rounded when nothing names it: a projection that is no head, table or
    router.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    lead: int
    contract: int
    usual: bool

    @property
    def outs(self) -> tuple[int, ...]:
        return self.shape[self.lead : len(self.shape) - self.contract]

    @property
    def ins(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.contract :]


def sites(tree: Any) -> dict[str, Site]:
    """Every matrix of a decoder by the path of its weight; those that are packed already are
    none.
    """
    stacked, names, found = in_body(tree), plain_paths(tree), {}
    for path, layer in paths(tree, lambda x: isinstance(x, MODULES)).items():
        if not isinstance(layer, MODULES) or isinstance(layer.weight, QuantizedWeight):
            continue
        path = f"{path}.weight"
        contract = layer.contract if isinstance(layer, Linear) else 1
        lead = int(stacked(path)) + isinstance(layer, Projections)
        usual = isinstance(layer, Linear | Projections) and not re.search(KEPT, path)
        site = Site(names(path), layer.weight.shape, lead, contract, usual)
        if site.outs:
            found[path] = site
    return found


def chosen(found: Mapping[str, Site], rules: Rules) -> dict[str, Rounding]:
    """How each matrix is rounded that is.

    Raises:
        ConfigError: a rule that is found nowhere or is no expression, bits that are not 8 or 4, or
            layers that are stacked and would differ.
    """
    if not isinstance(rules, Mapping):
        usual = {path: site for path, site in found.items() if site.usual}
        return dict.fromkeys(usual, _alike(_rounding(rules), usual.values()))
    every = [name for site in found.values() for name in site.names]
    parsed = {_expression(text, every): _rounding(each) for text, each in rules.items()}

    def first(name: str) -> Any:
        return next((r for rule, r in parsed.items() if rule.search(name)), None)

    out = {}
    for path, site in found.items():
        ways = {first(name) for name in site.names}
        if len(ways) > 1:
            raise ConfigError(
                f"Rules treat {site.names[0]} and others that are stacked with it unlike; load "
                "with scan_layers=False."
            )
        out[path] = ways.pop()
    wanted = {path: rounding for path, rounding in out.items() if rounding is not None}
    four = [path for path, each in wanted.items() if each == Rounding(4)]
    shared = _alike(Rounding(4), [found[path] for path in four])
    return wanted | dict.fromkeys(four, shared)


def _alike(rounding: Rounding, found: Iterable[Site]) -> Rounding:
    """With the group that divides the inputs of all, if there is one: files know of no others."""
    if rounding.bits == 8 or rounding.group is not None:
        return rounding
    widths = [math.prod(site.ins) for site in found]
    group = next((g for g in rounding.groups if all(n % g == 0 for n in widths)), None)
    return dataclasses.replace(rounding, group=group)


def _rounding(value: Any) -> Any:
    if value is None or isinstance(value, Rounding):
        return value
    return NormalFloat() if value == NF4 else Rounding(value)


def _expression(text: str, names: list[str]) -> re.Pattern[str]:
    try:
        rule = re.compile(text)
    except re.error as error:
        raise ConfigError(f"The rule {text!r} is no regular expression: {error}.") from error
    if not any(rule.search(name) for name in names):
        raise ConfigError(
            f"The rule {text!r} is found in the path of no matrix.{did_you_mean(text, names)}"
        )
    return rule


def rounded_leaves(
    tree: Any,
    tensors: Mapping[str, LazyTensor],
    where: Mapping[str, NamedSharding | None],
    rules: Rules,
) -> tuple[dict[str, RoundedWeight], dict[str, QuantizedWeight]]:
    """Those of a model's weights that the rules mean, as leaves of lazy parts, and as leaves of the
    places of these parts.

    tree: the model, abstract or not. tensors and where: its plain weights and their shardings.

    Raises:
        ConfigError: see `chosen`; or a matrix that its rounding does not fit.
    """
    found = sites(tree)
    wanted = chosen({path: site for path, site in found.items() if path in tensors}, rules)
    leaves = {
        path: _leaf(path, found[path], tensors[path], rounding, where[path] is not None)
        for path, rounding in wanted.items()
    }
    return leaves, {path: leaf.shardings(where[path]) for path, leaf in leaves.items()}


def _leaf(
    path: str, site: Site, tensor: LazyTensor, rounding: Rounding, whole: bool
) -> RoundedWeight:
    rows, width = math.prod(site.outs), math.prod(site.ins)
    try:
        fitted = rounding.fitted(rows, width)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be rounded: {error} Give it another rule.") from error
    parts = rounded_parts(tensor.reshape((*tensor.shape[: site.lead], rows, width)), fitted)
    inner = (*site.outs, *site.ins)
    return rounded_weight(parts, fitted, inner, len(site.outs), tensor.dtype, whole=whole)


def rounded(tree: Any, rules: Rules) -> Any:
    """A live model's parts with rounded weights; what the rules leave is shared.

    Raises:
        ConfigError: as `rounded_leaves`, or a model with adapters.
    """
    arrays = paths(tree)
    packed = paths(tree, lambda x: isinstance(x, QuantizedWeight))
    held = next((p for p, x in packed.items() if isinstance(x, QuantizedWeight)), None)
    if held is not None:
        raise ConfigError(
            f"{held} is packed already; rounding it again would add one error to another. Round "
            "the model as it was loaded, with rules for all of its weights."
        )
    hidden = [path for path in sites(tree) if path not in arrays]
    if hidden:
        raise ConfigError(
            f"{hidden[0]} is no plain weight. Merge adapters, or quantise first and add them then."
        )
    lazies = {path: ArrayTensor(arrays[path]) for path in sites(tree)}
    where = {path: _placed(arrays[path]) for path in lazies}
    leaves, places = rounded_leaves(tree, lazies, where, rules)
    return rebuild(tree, {**arrays, **place(leaves, places)})


def _placed(x: jax.Array) -> NamedSharding | None:
    held = getattr(x, "sharding", None)
    return held if isinstance(held, NamedSharding) else None
