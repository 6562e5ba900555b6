"""One side of `bench/train.py`: EasyDeL, by the step function of its own trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import easydel
import jax
import jax.numpy as jnp
import numpy as np
from easydel.infra.base_state import EasyDeLState
from easydel.modules.llama import LlamaConfig, LlamaForCausalLM
from easydel.trainers.trainer._fn import training_step
from easydel.utils.compiling_utils import ejit
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from shapes import STEP, batch_of, folder
from worker import NOTES, serve


def load(masters: str, dtype: str, rows: int, length: int) -> Any:
    """The model, its weights from the file: EasyDeL's own loader is written for torch's tensors."""
    where = folder(masters)
    read = json.loads((Path(where) / "config.json").read_text())
    config = LlamaConfig(**{k: v for k, v in read.items() if k not in ("architectures", "dtype")})
    model = LlamaForCausalLM(
        config, dtype=getattr(jnp, dtype), param_dtype=getattr(jnp, masters), rngs=nnx.Rngs(0)
    )
    tensors = load_file(Path(where) / "model.safetensors")
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def filled(path: Any, old: jax.Array) -> jax.Array:
        x = tensors[file_name(path)]
        new = jnp.asarray(x.T if at(path)[-1] == "kernel" and x.ndim == 2 else x, old.dtype)
        assert new.shape == old.shape
        return jax.device_put(new, old.sharding)

    return nnx.merge(graph, jax.tree.map_with_path(filled, weights), rest)


def at(path: Any) -> list[str]:
    parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return [x for x in parts if x != "value"]


def file_name(path: Any) -> str:
    """The tensor of a weight; the head is the table of embeddings."""
    parts = at(path)
    name = "model.embed_tokens" if parts[0] == "lm_head" else ".".join(parts[:-1])
    return f"{name}.weight"


def train(dtype: str, batch: int, length: int, masters: str) -> Callable[[], float]:
    """Seconds for one AdamW step: weights and moments in `masters`, arithmetic in `dtype`."""
    model = load(masters, dtype, batch, length)
    arguments = easydel.TrainingArguments(
        model_name="bench",
        optimizer="adamw",
        scheduler="none",
        learning_rate=STEP["learning_rate"],
        weight_decay=STEP["weight_decay"],
        clip_grad=1.0,
        extra_optimizer_kwargs={"b1": STEP["beta1"], "b2": STEP["beta2"], "eps": STEP["eps"]},
        total_batch_size=batch,
    )
    tx, schedule = arguments.get_optimizer_and_scheduler(1000)
    with model.mesh:
        state = EasyDeLState.create(step=0, model=model).init_tx(tx)
        everywhere = NamedSharding(model.mesh, PartitionSpec())
        where = state.shardings
        step = ejit(
            training_step,
            static_argnums=(2, 3, 4, 5, 6),
            in_shardings=(where, everywhere),
            out_shardings=(where, everywhere),
            donate_argnums=(0,),
        )
    ids = batch_of(batch, length).astype(np.int32)
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    data = jax.device_put(data, everywhere)
    fixed = (arguments.loss_config, schedule, arguments.step_partition_spec, 1, None)
    held = [state]

    def once() -> float:
        start = time.perf_counter()
        with model.mesh:
            held[0], metrics = step(held[0], data, *fixed)
        jax.block_until_ready((held[0].graphstate, held[0].opt_state, metrics))
        seconds = time.perf_counter() - start
        NOTES["loss"] = float(metrics.loss)
        return seconds

    return once


if __name__ == "__main__":
    about = f"EasyDeL {easydel.__version__} on jax {jax.__version__}, its default attention"
    serve({"train": train}, about)
