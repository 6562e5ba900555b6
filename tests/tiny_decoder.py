"""Golden models built without the loader, small enough to train in a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden import by_path, case
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING

from flaxen.core.tree import is_param, module, paths, static
from flaxen.families import find
from flaxen.families.family import Reading
from flaxen.layers.runtime import Runtime
from flaxen.model import Origin
from flaxen.models.causal import forward
from flaxen.models.fold import fold, stack_params
from flaxen.shard import Placement, make_mesh, plan_named
from flaxen.tune import LowRank


@module
class Tiny:
    """What training asks of a model: module, runtime, config, origin, generation_config, replace,
    save."""

    module: Any
    runtime: static[Runtime] = Runtime()
    config: static[Any] = None
    origin: static[Any] = Origin(config_json="{}")
    generation_config: static[Any] = None

    def replace(self, **changes: Any) -> Tiny:
        return dataclasses.replace(self, **changes)

    def save(self, folder: Any, tokenizer: Any = None) -> Path:
        """Every weight under our own path, and the config."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {path: np.asarray(leaf) for path, leaf in paths(self.module).items()}
        save_file(arrays, folder / "model.safetensors")
        self.config.save_pretrained(folder)
        return folder


def tiny(
    name: str = "llama", *, folded: bool = True, mesh: str | None = None, dtype: Any = jnp.float32
) -> Tiny:
    """A golden model, on a mesh if asked."""
    golden = case(name)
    keys = {key: value for key, value in golden.config.items() if key != "model_type"}
    config = CONFIG_MAPPING[golden.about["model_type"]](**keys)
    family = find(golden.about["model_type"])
    abstract = family.build(Reading(config))
    weights = by_path(golden, abstract, family.names)
    params = paths(abstract, is_leaf=is_param)
    structure = jax.tree.structure(abstract, is_leaf=is_param)
    leaves = [weights[path] for path in params]
    model = jax.tree.unflatten(structure, leaves)
    if folded:
        model = dataclasses.replace(model, layers=fold(model.layers, np.stack))
        abstract = dataclasses.replace(abstract, layers=fold(abstract.layers, stack_params))
    if mesh is None:
        return Tiny(module=jax.tree.map(lambda x: jnp.asarray(x, dtype), model), config=config)
    placement = Placement(make_mesh(mesh), plan_named("auto"))
    arrays = [
        jax.device_put(jnp.asarray(x, dtype), placement.weight(param))
        for x, param in zip(
            jax.tree.leaves(model), paths(abstract, is_leaf=is_param).values(), strict=True
        )
    ]
    module = jax.tree.unflatten(jax.tree.structure(model), arrays)
    return Tiny(module=module, runtime=Runtime(placement=placement), config=config)


def logits(model: Tiny, module: Any) -> np.ndarray:
    """What `module` makes of the golden ids, run as `model` is."""
    ids = case("llama").arrays["full_input_ids"]
    return np.asarray(forward(module, ids, runtime=model.runtime).logits)


def filled(module: Any) -> Any:
    """The model with random numbers in every adapter's `b`."""

    def fill(x: Any) -> Any:
        if not isinstance(x, LowRank):
            return x
        b = np.random.default_rng(x.b.size).normal(size=x.b.shape) * 0.1
        return dataclasses.replace(x, b=jax.device_put(b.astype(np.float32), x.b.sharding))

    return jax.tree.map(fill, module, is_leaf=lambda x: isinstance(x, LowRank))
