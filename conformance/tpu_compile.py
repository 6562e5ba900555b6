"""Compiles Llama-3-8B for a TPU that is not here, under every mechanism that takes it there.

    python conformance/tpu_compile.py [--topology v5p:2x2x2] [--mesh fsdp=8] [--only splash ...]

Needs the libtpu package, and no TPU. Prints memory per device, collectives and compile time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from flaxen.attention import AttentionSettings
from flaxen.core.platform import compiling_for
from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.runtime import Checkpointing, Runtime
from flaxen.models.causal import extend, whole_context
from flaxen.models.fold import folded, stack_params
from flaxen.shard import Placement, make_mesh, plan_named

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MECHANISMS = ("splash", "flash", "pallas_flash", "ring", "blockwise", "sdpa")
HEAD = f"{'mechanism':<13}{'program':<9}{'mesh':<14}{'s':>6}  arguments  temporary  collectives"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--mesh", default="fsdp=8", help="of all but the ring")
    parser.add_argument("--ring-mesh", default="fsdp=2,sp=4")
    parser.add_argument("--only", nargs="*", default=MECHANISMS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    shared = {"rows": args.rows, "length": args.length}
    if not args.json:
        size = f"{args.rows} rows of {args.length}"
        print(f"Llama-3-8B, {size}, on {args.topology}, jax {jax.__version__}")
        print(HEAD)
    for name in args.only:
        mesh = args.ring_mesh if name.endswith("ring") else args.mesh
        placement = Placement(make_mesh(mesh, devices), plan_named("auto"))
        for program in (forward, train, decode):
            row = {"mechanism": name, "program": program.__name__, "mesh": mesh}
            row |= compiled(program, runtime(name, placement), **shared)
            print(json.dumps(row) if args.json else line(row), flush=True)


def runtime(mechanism: str, placement: Placement) -> Runtime:
    return Runtime(
        placement=placement,
        attention=AttentionSettings(mechanism),
        checkpointing=Checkpointing("block"),
    )


def compiled(program: Any, run: Runtime, *, rows: int, length: int) -> dict[str, Any]:
    """What the compiler says about one program, or why there is none."""
    start = time.perf_counter()
    with compiling_for("tpu"), tempfile.TemporaryDirectory() as folder:
        try:
            function, arguments = program(run, rows, length)
            lowered = function.trace(*arguments).lower(lowering_platforms=("tpu",))
            # The text of some programs cannot be asked for (jaxlib 0.10.2), so it is written out.
            dump: Any = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            built = lowered.compile(compiler_options=dump)
        except Exception as error:  # the table shows what each mechanism cannot do
            said = f"{type(error).__name__}: {error}"
            return {"seconds": time.perf_counter() - start, "error": said[:300]}
        seconds, memory = time.perf_counter() - start, built.memory_analysis()
        text = "".join(p.read_text() for p in Path(folder).glob("*.after_optimizations.txt"))
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return {
        "seconds": seconds,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": dict(collections.Counter(found)),
    }


def line(row: dict[str, Any]) -> str:
    head = f"{row['mechanism']:<13}{row['program']:<9}{row['mesh']:<14}{row['seconds']:>6.1f}"
    if "error" in row:
        return f"{head}  {row['error']}"
    sizes = "".join(f"{row[key] / 2**30:>7.2f} GiB" for key in ("arguments", "temporary"))
    kinds = ", ".join(f"{kind} {count}" for kind, count in row["collectives"].items())
    return f"{head}{sizes}  {kinds or 'none'}"


def weights(run: Runtime, dtype: Any) -> Any:
    """The model as shapes on their places."""
    assert run.placement is not None
    module = folded(abstract_module(hf_config(LLAMA_3_8B))[0], stack_params)
    place = run.placement.weight
    shape = lambda p: jax.ShapeDtypeStruct(p.shape, dtype, sharding=place(p))
    return jax.tree.map(shape, module, is_leaf=is_param)


def tokens(run: Runtime, rows: int, length: int) -> jax.ShapeDtypeStruct:
    assert run.placement is not None
    where = run.placement.activation((rows, length), ("batch", "seq"))
    return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=where)


def forward(run: Runtime, rows: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    def score(decoder: Any, ids: jax.Array, targets: jax.Array) -> jax.Array:
        return decoder.loss(ids, targets, whole_context(decoder, ids.shape, run))[0]

    ids = tokens(run, rows, length)
    return jax.jit(score), (weights(run, jnp.bfloat16), ids, ids)


def train(run: Runtime, rows: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of Adam on float32 masters."""
    import optax

    adam = optax.adam(1e-4)
    masters = weights(run, jnp.float32)

    def step(masters: Any, moments: Any, ids: jax.Array, targets: jax.Array) -> Any:
        def loss(masters: Any) -> jax.Array:
            decoder = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
            return decoder.loss(ids, targets, whole_context(decoder, ids.shape, run))[0]

        value, grads = jax.value_and_grad(loss)(masters)
        changes, moments = adam.update(grads, moments)
        return jax.tree.map(jnp.add, masters, changes), moments, value

    moments = jax.eval_shape(adam.init, masters)
    places = {m.shape: m.sharding for m in jax.tree.leaves(masters)}
    moments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places.get(x.shape)), moments
    )
    ids = tokens(run, rows, length)
    return jax.jit(step, donate_argnums=(0, 1)), (masters, moments, ids, ids)


def decode(run: Runtime, rows: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    """One token for each row on a cache of `length` slots."""
    assert run.placement is not None
    module = weights(run, jnp.bfloat16)
    whole = run.placement.replicated()
    empty = jax.eval_shape(lambda m: m.init_cache(rows, length), module)
    axes = ("batch", "kv_heads", "keys", "head_dim")

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert run.placement is not None
        names = ("layers",) * (x.ndim - 4) + axes if x.ndim >= 4 else None
        where = run.placement.activation(x.shape, names) if names else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def step(decoder: Any, ids: jax.Array, cache: Any) -> Any:
        x, cache = extend(decoder, ids, cache, jnp.ones(ids.shape, bool), run)
        return decoder.logits(x[:, 0], run).argmax(-1), cache

    arguments = (module, tokens(run, rows, 1), jax.tree.map(place, empty))
    return jax.jit(step, donate_argnums=2), arguments


if __name__ == "__main__":
    main()
