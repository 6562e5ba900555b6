"""Rows computed where they lie: each device takes its own, and what they share is gathered once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.core.dot import is_leaf_type
from flaxen.shard import Placement
from flaxen.shard.specs import mesh_axes, ways

WHOLE = P()


@dataclasses.dataclass(frozen=True)
class RowShards:
    """How rows of a shape, (batch, seq) or (batch,), are cut: along which mesh axes their batch and
    their sequence lie already, and `rest` that cut each device's own rows further, as the shape did
    not divide by them. Without a placement there is one shard.
    """

    shape: tuple[int, ...]
    placement: Placement | None = None
    batch: tuple[str, ...] = ()
    seq: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh | None:
        return None if self.placement is None else self.placement.mesh

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.batch, *self.seq, *self.rest)

    def split(self, x: jax.Array, fill: Any = 0) -> jax.Array:
        """(shape..., more...) -> (shards, rows of each, more...), the last shards filled up."""
        more = x.shape[len(self.shape) :]
        if self.mesh is None:
            return x.reshape(1, math.prod(self.shape), *more)
        # Axes that are cut move to the front as they are, so that no row leaves its device.
        b, t = (ways(self.mesh, axes) for axes in (self.batch, self.seq))
        rows, tokens = self._sizes()
        x = jnp.swapaxes(x.reshape(b, rows // b, t, tokens // t, *more), 1, 2)
        x = x.reshape(b * t, -1, *more)
        k = ways(self.mesh, self.rest)
        short = -x.shape[1] % k
        x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * len(more), constant_values=fill)
        return x.reshape(b * t * k, -1, *more)

    def join(self, y: jax.Array) -> jax.Array:
        """What `split` was given."""
        more = y.shape[2:]
        if self.mesh is None:
            return y.reshape(*self.shape, *more)
        b, t = (ways(self.mesh, axes) for axes in (self.batch, self.seq))
        rows, tokens = self._sizes()
        y = y.reshape(b * t, -1, *more)[:, : rows * tokens // (b * t)]
        y = jnp.swapaxes(y.reshape(b, t, rows // b, tokens // t, *more), 1, 2)
        return y.reshape(*self.shape, *more)

    def pieces(self, x: jax.Array, chunk: int, fill: Any = 0) -> jax.Array:
        """(shape..., more...) -> (shards, chunks, rows of a chunk, more...), `fill` where there is
        no row.
        """
        x = self.split(x, fill)
        shards, rows, *more = x.shape
        chunk = min(chunk, max(rows, 1))
        chunks = -(-rows // chunk)
        short = chunk * chunks - rows
        x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * len(more), constant_values=fill)
        # Strided: where one shard lies on several devices all the same, each has part of a chunk.
        return jnp.swapaxes(x.reshape(shards, chunk, chunks, *more), 1, 2)

    def whole(self, y: jax.Array) -> jax.Array:
        """(shards, chunks, rows of a chunk, more...) -> (shape..., more...)."""
        shards, chunks, chunk, *more = y.shape
        y = jnp.swapaxes(y, 1, 2).reshape(shards, chunk * chunks, *more)
        return self.join(y[:, : self.rows])

    @property
    def rows(self) -> int:
        """Of one shard."""
        return -(-math.prod(self.shape) // (ways(self.mesh, self.axes) if self.mesh else 1))

    def _sizes(self) -> tuple[int, int]:
        rows, *tokens = self.shape
        return rows, math.prod(tokens)

    def run(
        self,
        function: Callable[[Any, Any], tuple[Any, Any]],
        rows: Any,
        shared: Any,
        stored: Any = WHOLE,
    ) -> Any:
        """`function` of each shard's rows and all of `shared` -> what it makes of each row, and
        sums over rows. The latter are added up over all shards, in their own dtype, each device its
        part of them as `stored` says, a prefix of their tree.

        Mesh axes that cut no rows, such as those of a vocabulary, are left to the compiler. Each
        device holds `shared`, and its own sums of that shape, whole but for those axes.
        """

        def here(rows: Any, shared: Any) -> Any:
            made = function(jax.tree.map(lambda x: x[0], rows), shared)
            return jax.tree.map(lambda y: y[None], made)

        if self.mesh is None:
            each, sums = here(rows, shared)
            return each, jax.tree.map(lambda y: y[0], sums)
        each, sums = jax.shard_map(
            here,
            mesh=self.mesh,
            in_specs=(P(self.axes), P()),
            out_specs=(P(self.axes), jax.tree.map(lambda at: P(sum(self._order(at), ())), stored)),
            axis_names=set(self.axes),
            check_vma=False,
        )(rows, shared)
        return each, jax.tree.map(lambda at, y: jax.tree.map(self._adding(at), y), stored, sums)

    def _order(self, stored: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of the shards: those that sums are not cut along, and those that they are."""
        cut = {axis for entry in stored for axis in mesh_axes(entry)}
        rest = tuple(axis for axis in self.axes if axis not in cut)
        return rest, tuple(axis for axis in self.axes if axis in cut)

    def _adding(self, stored: P) -> Callable[[jax.Array], jax.Array]:
        """Each device is sent its part of each shard's sums (an all-to-all); the compiler for TPUs
        would send all of their sum to all.
        """
        assert self.mesh is not None
        at = NamedSharding(self.mesh, P(self._order(stored)[0] or None, *stored))
        return lambda y: jax.lax.with_sharding_constraint(y, at).sum(0)

    def stored(self, head: Any) -> Any:
        """How the plan cuts sums for each part of a head (weight, bias). A leaf's integers have no
        sum but a scalar.
        """
        weight, bias = head
        if self.placement is None or len(weight.shape) != 2:
            return WHOLE
        vocab, embed = weight.shape
        spec = self.placement.weight_spec({"vocab": vocab, "embed": embed})
        where = NamedSharding(self.placement.mesh, spec)
        at = weight.shardings(where) if is_leaf_type(weight) else where
        of = lambda at, x: at.spec if jnp.issubdtype(x.dtype, jnp.inexact) else WHOLE
        return jax.tree.map(of, at, weight), None if bias is None else P(*spec[:1])


def row_shards(placement: Placement | None, shape: tuple[int, ...]) -> RowShards:
    """Of the rows of activations, as the plan lays them out; mesh axes that cut a vocabulary cut no
    rows here.
    """
    if placement is None:
        return RowShards(shape)
    names, rules = ("batch", "seq")[: len(shape)], dict(placement.plan.activations)
    taken = {*rules.get("vocab", ()), *dict(placement.plan.weights).get("vocab", ())}
    free = lambda axes: tuple(
        axis for axis in axes if axis not in taken and placement.mesh.shape.get(axis, 1) > 1
    )
    cut = [free(mesh_axes(entry)) for entry in placement.activation_spec(shape, names)]
    every = dict.fromkeys(axis for name in ("batch", "seq") for axis in free(rules.get(name, ())))
    if not every:
        return RowShards(shape)
    batch, seq = (*cut, ())[:2]
    rest = tuple(axis for axis in every if axis not in (*batch, *seq))
    return RowShards(shape, placement, batch, seq, rest)
