"""How we run a model, as opposed to what the checkpoint says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flaxen.attention import AttentionSettings, known
from flaxen.cache import CacheSettings
from flaxen.core.checks import at_least, of_kind, one_of, true_or_false
from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.plain import differences, from_plain, to_plain
from flaxen.core.platform import platform
from flaxen.layers.checkpointing import Checkpointing
from flaxen.shard import Placement
from flaxen.shard.mesh import MESH_AXES

FILE = "flaxen.json"
"""Where it is written, beside config.json, which is Hugging Face's and says nothing of it."""

FLOATS = (None, "float32", "bfloat16", "float16", "float64")
PRECISIONS = (None, "default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
PURPOSES = (None, "train", "serve", "convert")


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """scan: run feed-forward networks over pieces of at most `chunk` tokens, one after another.
    exchange: send tokens to the devices that hold their experts where that can be, instead of
    through the experts of every device.
    """

    scan: bool = False
    chunk: int = 1024
    exchange: bool = True

    def __post_init__(self) -> None:
        true_or_false(**{"mlp.scan": self.scan, "mlp.exchange": self.exchange})
        at_least("mlp.chunk", self.chunk, 1)


@dataclasses.dataclass(frozen=True)
class WeightSettings:
    """How weights are stored and multiplied.

    bits: 8 or 4 for weights that stay packed. dtype: what is computed in; param_dtype: what is
    stored; None is the checkpoint's own. precision: of products, as jax names them: "highest".
    """

    bits: int | None = None
    dtype: str | None = None
    param_dtype: str | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        one_of("weights.bits", self.bits, (None, 8, 4))
        one_of("weights.dtype", self.dtype, FLOATS)
        one_of("weights.param_dtype", self.param_dtype, FLOATS)
        one_of("weights.precision", self.precision, PRECISIONS)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One value for each way of running; `placement` is a plan on a mesh.

    constrain_blocks: lay the residual stream out after every block as the plan says, instead of
    leaving it to the compiler. scan_layers: fold equal layers into one compiled body; None does so
    where it costs no speed (not on CPU). purpose implies what nothing else says: `train` stores
    float32 masters, `serve` uses up the cache that a call is given, `convert` keeps layers apart.

    Raises:
        ConfigError: naming the setting, what it is and what is expected.
    """

    placement: Placement | None = None
    attention: AttentionSettings = AttentionSettings()
    cache: CacheSettings = CacheSettings()
    mlp: MLPSettings = MLPSettings()
    checkpointing: Checkpointing = dataclasses.field(default_factory=Checkpointing)
    weights: WeightSettings = WeightSettings()
    constrain_blocks: bool = True
    scan_layers: bool | None = None
    purpose: str | None = None

    def __post_init__(self) -> None:
        of_kind(
            placement=(self.placement, Placement | None),
            attention=(self.attention, AttentionSettings),
            cache=(self.cache, CacheSettings),
            mlp=(self.mlp, MLPSettings),
            checkpointing=(self.checkpointing, Checkpointing),
            weights=(self.weights, WeightSettings),
        )
        known(self.attention)
        true_or_false(constrain_blocks=self.constrain_blocks)
        one_of("scan_layers", self.scan_layers, (None, True, False))
        one_of("purpose", self.purpose, PURPOSES)
        _check_axes(self)

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Lay an activation out as the plan says; without a plan, nothing."""
        return x if self.placement is None else self.placement.constrain(x, axes)

    def computing(self, x: jax.Array) -> jax.Array:
        """Activations in the dtype that is computed in."""
        return x if self.weights.dtype is None else x.astype(self.weights.dtype)

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Products traced in here have the precision that is asked for."""
        with contextlib.ExitStack() as stack:
            if self.weights.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.weights.precision))
            yield

    def with_bits(self, bits: Any) -> Runtime:
        """Of a model whose weights are rounded so; rules by path have no place here."""
        weights = dataclasses.replace(self.weights, bits=bits if bits in (8, 4) else None)
        return dataclasses.replace(self, weights=weights)

    @property
    def stored(self) -> str | None:
        """The dtype of stored weights; None is the checkpoint's own."""
        masters = "float32" if self.purpose == "train" else None
        return self.weights.param_dtype or masters

    @property
    def folds(self) -> bool:
        """Whether equal layers are folded into one."""
        if self.scan_layers is not None:
            return self.scan_layers
        return self.purpose != "convert" and platform() != "cpu"

    def to_json(self) -> str:
        """All fields, as data.

        Raises:
            ConfigError: a mechanism of its own, or a mesh of devices in an order of their own.
        """
        return json.dumps(to_plain(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Runtime:
        """What `to_json` was called on; absent fields have their defaults.

        Raises:
            ConfigError: no JSON, unknown fields, or values of another kind.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"The runtime is no JSON: {error}.") from None
        return from_plain(cls, data)

    def __repr__(self) -> str:
        """One line for each field that differs from its default."""
        lines = [f"    {name} = {value!r}" for name, value in differences(self, PLAIN)]
        return "\n".join(["Runtime(", *lines, ")"]) if lines else "Runtime()"


def _check_axes(runtime: Runtime) -> None:
    """Mesh axes that settings name are in the mesh, or standard: then a mesh without them has them
    at size 1.
    """
    sizes = {} if runtime.placement is None else runtime.placement.sizes
    able = {*MESH_AXES, *sizes}
    specs = runtime.attention.specs
    named = {f"attention.specs.{f.name}": getattr(specs, f.name) for f in dataclasses.fields(specs)}
    named["attention.axis"] = PartitionSpec(runtime.attention.axis)
    for name, spec in named.items():
        for entry in spec or ():
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if axis is not None and axis not in able:
                    raise ConfigError(
                        f"{name} names the axis {axis!r}, which the mesh "
                        f"lacks.{did_you_mean(str(axis), able)}"
                    )


PLAIN = Runtime()
"""One device, everything chosen for us."""

RINGS = Runtime(cache=CacheSettings(layout="ring"))
"""With a ring in every layer with a window: what other caches are compared with."""
