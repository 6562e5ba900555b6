"""How attention is run, as opposed to what a model's layers ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec

from flaxen.core.checks import at_least, one_of, true_or_false
from flaxen.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the tiles that kernels work on, in queries (q), keys (k) and rows (b).

    `None` follows the base of the same letter; `dkv` and `dq` are the two backward kernels, `major`
    the tile that is fetched at once.
    """

    q: int = 128
    k: int = 128
    b: int = 1
    k_major: int | None = None
    q_major_dkv: int | None = None
    k_major_dkv: int | None = None
    q_dkv: int | None = None
    k_dkv: int | None = None
    k_major_dq: int | None = None
    q_dq: int | None = None
    k_dq: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                at_least(f"attention.blocks.{field.name}", value, 1)

    def get(self, name: str) -> int:
        """A size by name, the base's where it is not set: `get("k_major_dq")`."""
        value = getattr(self, name)
        return value if value is not None else getattr(self, name[0])


def _check_spec(name: str, spec: Any) -> None:
    """
    Raises:
        ConfigError: no PartitionSpec of at most four entries, or one that uses an axis twice.
    """
    if spec is None:
        return
    if not isinstance(spec, PartitionSpec) or len(spec) > 4:
        raise ConfigError(
            f"{name} is {spec!r}; expected a PartitionSpec over (batch, seq, heads, head_dim)."
        )
    axes = [a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))]
    used = [axis for axis in axes if axis is not None]
    if not all(isinstance(axis, str) for axis in used):
        raise ConfigError(f"{name} is {spec!r}; expected names of mesh axes, or None.")
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise ConfigError(
            f"{name} is {spec!r} and uses the mesh axis {twice[0]!r} twice; leave it in one place."
        )


@dataclasses.dataclass(frozen=True)
class Specs:
    """Layouts of activations in (batch, seq, heads, head_dim) order; None is what the plan says.

    `generation_*` apply when there is one query.
    """

    query: PartitionSpec | None = None
    key: PartitionSpec | None = None
    value: PartitionSpec | None = None
    bias: PartitionSpec | None = None
    attention: PartitionSpec | None = None
    generation_query: PartitionSpec | None = None
    generation_bias: PartitionSpec | None = None
    generation_attention: PartitionSpec | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_spec(f"attention.specs.{field.name}", getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Which mechanism computes attention, and its knobs.

    mechanism: a registered name, or `auto`. axis: the mesh axis that rings turn around.
    scan_ring: work through each ring step in blocks (bounded memory). balanced: give each device of
    a ring an early and a late piece of the sequence. backward: `triton` (kernel) or `xla`
    (recompute). sharded: obey the layouts inside attention. own: mechanisms of this model alone.
    """

    mechanism: str = "auto"
    blocks: Blocks = Blocks()
    specs: Specs = Specs()
    axis: str = "sp"
    scan_ring: bool = True
    balanced: bool = False
    backward: str = "triton"
    sharded: bool = True
    own: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        one_of("attention.backward", self.backward, ("triton", "xla"))
        for name in ("scan_ring", "balanced", "sharded"):
            true_or_false(**{f"attention.{name}": getattr(self, name)})
        if not isinstance(self.axis, str) or not self.axis:
            raise ConfigError(f"attention.axis is {self.axis!r}; expected a mesh axis, as 'sp'.")
