"""The documented flat names, where each stands in a `Runtime`, and the documented defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from flaxen.attention import Blocks, Specs
from flaxen.core.errors import ConfigError
from flaxen.core.plain import check_names, value_at, with_values
from flaxen.layers.runtime import Runtime
from flaxen.shard import MeshSpec, Placement, plan_named

MESH = ("axis_dims", "axis_names", "backend")

FIELDS = {
    "attn_mechanism": "attention.mechanism",
    **{f"block_{f.name}": f"attention.blocks.{f.name}" for f in dataclasses.fields(Blocks)},
    **{f"{f.name}_partition_spec": f"attention.specs.{f.name}" for f in dataclasses.fields(Specs)},
    "attention_axis_name": "attention.axis",
    "scan_ring_attention": "attention.scan_ring",
    "flash_attention_backward_pass_impl": "attention.backward",
    "shard_attention_computation": "attention.sharded",
    "use_sharding_constraint": "constrain_blocks",
    "use_sharded_kv_caching": "cache.sharded",
    "quantize_kv_cache": "cache.codec",
    "use_scan_mlp": "mlp.scan",
    "scan_mlp_chunk_size": "mlp.chunk",
    "scan_attention_layers": "scan_layers",
    "bits": "weights.bits",
    "easy_method": "purpose",
}

NAMES = (*MESH, *FIELDS)

_WHOLE = PartitionSpec(("dp", "fsdp"), "sp", "tp", None)
_ONE_QUERY = PartitionSpec(("dp", "fsdp"), None, "tp", None)
_BIAS = PartitionSpec(("dp", "fsdp"), None, None, None)

DOCUMENTED: dict[str, Any] = {
    "attn_mechanism": "sharded_vanilla",
    "use_sharding_constraint": False,
    "scan_attention_layers": True,
    "easy_method": "train",
    **{f"{x}_partition_spec": _WHOLE for x in ("query", "key", "value", "attention")},
    **{f"generation_{x}_partition_spec": _ONE_QUERY for x in ("query", "attention")},
    **{f"{x}bias_partition_spec": _BIAS for x in ("", "generation_")},
}
"""Where they differ from those of `Runtime`."""


def read(runtime: Runtime, name: str) -> Any:
    """The value of a documented name."""
    if name in MESH:
        return getattr(mesh_of(runtime), name)
    value = value_at(runtime, FIELDS[name])
    return value is not None if name == "quantize_kv_cache" else value


def written(runtime: Runtime, given: Mapping[str, Any]) -> Runtime:
    """The runtime with exactly these documented names changed.

    Raises:
        ConfigError: an unknown name, with the nearest one; or a value that makes no sense.
    """
    check_names(given, NAMES, "Runtime options")
    changes = {FIELDS[name]: value for name, value in given.items() if name not in MESH}
    if isinstance(changes.get("cache.codec"), bool):
        changes["cache.codec"] = "int8" if changes["cache.codec"] else None
    mesh = {name: given[name] for name in MESH if name in given}
    if mesh:
        before = mesh_of(runtime)
        spec = MeshSpec(**{name: getattr(before, name) for name in MESH} | mesh)
        plan = plan_named(None) if runtime.placement is None else runtime.placement.plan
        changes["placement"] = Placement(spec, plan)
    return _set(runtime, changes, given)


def _set(runtime: Runtime, changes: Mapping[str, Any], given: Mapping[str, Any]) -> Runtime:
    """The runtime so changed; what is wrong is told by its documented name, too."""
    try:
        return with_values(runtime, changes)
    except ConfigError as error:
        named = [name for name in given if f"{FIELDS.get(name)} is " in str(error)]
        raise ConfigError(": ".join([*named, str(error)])) from None


def mesh_of(runtime: Runtime) -> MeshSpec:
    """The description of its mesh; without one, the documented default."""
    on = MeshSpec() if runtime.placement is None else runtime.placement.on
    return MeshSpec.of(dict(on.shape)) if isinstance(on, Mesh) else on


DEFAULT = written(Runtime(), DOCUMENTED | {"axis_dims": (1, -1, 1, 1)})
"""What the documentation says of a config that nothing was asked of."""
