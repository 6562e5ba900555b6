"""How attention is run, as opposed to what a model's layers ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec


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

    def get(self, name: str) -> int:
        """A size by name, the base's where it is not set: `get("k_major_dq")`."""
        value = getattr(self, name)
        return value if value is not None else getattr(self, name[0])


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
