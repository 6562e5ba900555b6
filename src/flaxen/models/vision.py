"""Models that see: patches, layers that look both ways, and a head."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.norm import Identity
from flaxen.layers.patches import Grid, GridPositions, Patches, grid_of
from flaxen.layers.runtime import Runtime
from flaxen.models.classifiers import SequenceHead
from flaxen.models.fold import run, unfold
from flaxen.models.heads import Bare, Head, Last
from flaxen.models.inputs import array
from flaxen.models.skeleton import How, Skeleton


@module
class Tower:
    """From pictures to states of their patches.

    class_token: (D,) and registers: (R, D) stand before the patches; registers get no position.
    pre_norm: before the layers; norm: after them; pooler: from states
    (B, T, D) and the context to (B, D).
    mask_token: in files of models that learnt to guess hidden patches; unused. resizes: whether
    pictures of other sizes than `image` need not be asked for; dropout: of what the layers get.
    """

    patches: Patches
    layers: Any
    class_token: Any = None
    registers: Any = None
    mask_token: Any = None
    positions: GridPositions
    pre_norm: Any = Identity()
    norm: Any = Identity()
    pooler: Any = None
    image: static[Grid]
    resizes: static[bool] = False
    dropout: static[float] = 0.0

    @property
    def leading(self) -> int:
        """How many tokens stand before the patches."""
        registers = 0 if self.registers is None else self.registers.shape[0]
        return registers + (self.class_token is not None)

    def check(self, pixel_values: Any, other_sizes: Any = None) -> Any:
        """Pictures (B, C, H, W) as an array. other_sizes: whether they may have another size.

        Raises:
            InputError: another shape, or numbers of another kind.
        """
        pixels = array(pixel_values)
        channels, (rows, columns) = self.patches.weight.shape[1], self.patches.size
        if (
            pixels.ndim != 4
            or not len(pixels)
            or pixels.shape[1] != channels
            or not jnp.issubdtype(pixels.dtype, jnp.floating)
        ):
            raise InputError(
                f"pixel_values are {pixels.dtype} of shape {pixels.shape}; expected floats of "
                f"shape (batch, {channels}, height, width), as the image processor makes them."
            )
        size = pixels.shape[2:]
        if size != self.image and not (other_sizes or self.resizes):
            raise InputError(
                f"The pictures have {size[0]} x {size[1]} pixels; this model was made for "
                f"{self.image[0]} x {self.image[1]}. Resize them, or pass "
                "interpolate_pos_encoding=True."
            )
        if min(grid_of(size, (rows, columns))) < 1:
            raise InputError(
                f"The pictures have {size[0]} x {size[1]} pixels, which is less than one patch of "
                f"{rows} x {columns}."
            )
        return pixels

    def context(
        self, shape: tuple[int, int], runtime: Runtime, dropout_key: jax.Array | None = None
    ) -> Context:
        """What the layers look at. shape: pictures, and tokens of each."""
        slots = jnp.arange(shape[1], dtype=jnp.int32)
        return Context(
            positions=jnp.broadcast_to(slots, shape),
            scene=Scene(q_slots=slots, k_slots=slots, aligned=True),
            rotary=(),
            dropout_key=dropout_key,
            runtime=runtime,
        )

    def hidden(
        self,
        pixels: jax.Array,
        runtime: Runtime,
        dropout_key: jax.Array | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], Context]:
        """Pictures -> states (B, T, D), if `collect` those before and after each layer, and the
        context that they were made in.
        """
        with runtime.products():
            x = self.embedded(pixels, runtime)
            ctx = self.context((x.shape[0], x.shape[1]), runtime, dropout_key)
            key = ctx.of_layer(len(self.layers)).dropout_key
            first = x = self.pre_norm(dropout(x, self.dropout, key))
            x, _, states = run(self.layers, x, ctx, None, collect)
            return self.norm(x), (first, *states), ctx

    def embedded(self, pixels: jax.Array, runtime: Runtime) -> jax.Array:
        """Tokens and their positions, in the dtype that is computed in: (B, T, D)."""
        x = self.patches(pixels)
        row = lambda token: jnp.broadcast_to(token.astype(x.dtype), (len(x), *token.shape))
        if self.class_token is not None:
            x = jnp.concatenate([row(self.class_token[None]), x], 1)
        grid = grid_of((pixels.shape[2], pixels.shape[3]), self.patches.size)
        x = x + self.positions(grid).astype(x.dtype)
        if self.registers is not None:
            x = jnp.concatenate([x[:, :1], row(self.registers), x[:, 1:]], 1)
        return runtime.constrain(runtime.computing(x), "batch", "seq", "embed")


@module
class ImageHead(SequenceHead):
    """Labels of a whole picture."""

    name: ClassVar[str] = "image classification"


@module
class ImageEncoder(Skeleton):
    """Pictures in; out comes what the head makes of their states."""

    tower: Tower
    head: Head = Bare()

    @property
    def embed_tokens(self) -> None:
        return None

    def kind(self) -> str:
        head = f"for {self.head.name}" if self.head.name else "without a head"
        return f"an image encoder {head}"

    def bare(self) -> bool:
        return isinstance(self.head, Bare)

    def takes(self) -> tuple[str, ...]:
        return ("pixel_values", "interpolate_pos_encoding", *self.head.targets)

    def example(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        tower = self.tower
        picture = (shape[0], tower.patches.weight.shape[1], *tower.image)
        return {"pixel_values": jax.ShapeDtypeStruct(picture, jnp.float32)}

    def call(
        self,
        how: How,
        *,
        pixel_values: Any,
        interpolate_pos_encoding: Any = None,
        **targets: Any,
    ) -> Any:
        """What the head makes of pictures (B, C, H, W)."""
        pixels = self.tower.check(pixel_values, interpolate_pos_encoding)
        return forward(
            self,
            pixels,
            self.head.check(pixels.shape[:1], targets),
            how.dropout_key,
            runtime=how.runtime,
            hidden_states=how.hidden_states,
            attentions=how.attentions,
        )

    def output(self, x: jax.Array, ctx: Context) -> Any:
        """What becomes of the last states (B, T, D)."""
        key = ctx.of_layer(len(self.tower.layers) + 1).dropout_key
        return self.head(Last(x, jnp.ones(x.shape[:2], bool), None, (len(x),), key))


@partial(jax.jit, static_argnames=("runtime", "hidden_states", "attentions"))
def forward(
    encoder: ImageEncoder,
    pixels: jax.Array,
    targets: dict[str, jax.Array],
    dropout_key: jax.Array | None,
    *,
    runtime: Runtime,
    hidden_states: bool = False,
    attentions: bool = False,
) -> Any:
    """The head's output, and its loss if there are targets enough."""
    tower, collect = encoder.tower, hidden_states or attentions
    x, states, ctx = tower.hidden(pixels, runtime, dropout_key, collect)
    with runtime.products():
        out = encoder.output(x, ctx)
    return dataclasses.replace(
        out,
        loss=encoder.head.loss(out, targets) if targets else None,
        hidden_states=states if hidden_states else None,
        attentions=seen(tower.layers, states, ctx) if attentions else None,
    )


def seen(layers: Any, states: tuple[jax.Array, ...], ctx: Context) -> tuple[jax.Array, ...]:
    """What each layer looks at, computed again from what it was given."""
    with ctx.runtime.products():
        given = enumerate(zip(unfold(layers, lambda x, i: x[i]), states[:-1], strict=True))
        return tuple(layer.attentions(x, ctx.of_layer(i)) for i, (layer, x) in given)
