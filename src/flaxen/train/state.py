"""Weights in training, for loops of one's own: with an optimiser, on a mesh, saved and resumed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from flaxen.core.dot import is_leaf_type
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.core.tree import buffers, is_param, module, name_of, paths, rebuild, static
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.runtime import FILE, Runtime
from flaxen.models.fold import Folded, folded, stack_params
from flaxen.train.checkpoint import Checkpoints
from flaxen.train.moments import opt_shapes, opt_state

CONFIG = "config.json"


@module
class State:
    """A pytree of the step's number, the weights and the optimiser's state; static are
    `apply_fn`, which is called with `params=`, the optax optimiser `tx` (None: weights alone), how
    the model is run, and its config.json.
    """

    step: jax.Array
    params: Any
    opt_state: Any = None
    apply_fn: static[Any] = None
    tx: static[Any] = None
    runtime: static[Runtime] = Runtime()
    config_json: static[str] = "{}"

    @classmethod
    def create(cls, *, params: Any, tx: Any = None, **static: Any) -> Any:
        """Step 0; the optimiser's state lies as the weights do.

        Raises:
            ConfigError: weights that are stored in few bits, which no optimiser can move.
        """
        packed = [path for path, x in paths(params, is_leaf_type).items() if is_leaf_type(x)]
        if packed:
            raise ConfigError(
                f"{packed[0]} is no plain weight, and a state holds such alone. Load the model "
                "without bits= (and merge adapters); `flaxen.train` trains adapters on packed ones."
            )
        state = None if tx is None else opt_state(tx, params)
        return cls(step=jnp.zeros((), jnp.int32), params=params, opt_state=state, tx=tx, **static)

    def apply_gradients(self, grads: Any) -> Any:
        """The state after one update of the optimiser, which moves no buffer.

        Raises:
            ConfigError: there is no optimiser.
        """
        import optax

        if self.tx is None:
            raise ConfigError("This state has no optimiser; create it with tx=optax.adamw(1e-4).")
        updates, moments = self.tx.update(grads, self.opt_state, self.params)
        held = set(buffers(self.params))
        updates = jax.tree.map_with_path(
            lambda path, x: jnp.zeros_like(x) if name_of(path) in held else x, updates
        )
        params = optax.apply_updates(self.params, updates)
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=moments)

    def shard_params(self, runtime: Runtime) -> Any:
        """The same state on the mesh of another runtime.

        Raises:
            ConfigError: a runtime without a mesh.
        """
        if runtime.placement is None:
            raise ConfigError("This runtime has no mesh; make one with placement_on('fsdp=-1').")
        # Folded or not, the layers stay as they are.
        runtime = dataclasses.replace(runtime, scan_layers=isinstance(self.params.layers, Folded))
        kinds = {path: x.dtype for path, x in paths(self.params).items()}
        where = jax.tree.map(lambda x: x.sharding, _shapes(self.config_json, runtime, kinds))
        params = jax.device_put(self.params, where)
        moments = self.opt_state
        if self.tx is not None:
            shapes = opt_shapes(self.tx, params)
            moments = jax.device_put(moments, jax.tree.map(lambda x: x.sharding, shapes))
        return dataclasses.replace(self, params=params, opt_state=moments, runtime=runtime)

    def save_state(self, folder: str | Path) -> Path:
        """Write weights, optimiser, step, config and runtime."""
        runtime = self.runtime.to_json()
        checkpoints = Checkpoints(Path(folder), {})
        target = checkpoints.save(int(self.step), self)
        checkpoints.close()
        (Path(folder) / CONFIG).write_text(self.config_json, encoding="utf-8")
        (Path(folder) / FILE).write_text(runtime, encoding="utf-8")
        return target

    @classmethod
    def restored(
        cls,
        folder: str | Path,
        *,
        tx: Any = None,
        apply_fn: Callable[..., Any] | None = None,
        runtime: Runtime | None = None,
    ) -> Any:
        """The last state that was saved in a folder, as its runtime or another lays it out.

        `tx` is the optimiser that it was trained with, as that is code.

        Raises:
            CheckpointError: nothing is there, it is damaged, or `tx` is another optimiser.
        """
        config, runtime = read_about(folder, runtime)
        saved = Checkpoints(Path(folder), {})
        params = _shapes(config, runtime, saved.dtypes("params"))
        like = cls(
            step=_scalar(params),
            params=params,
            opt_state=None if tx is None else opt_shapes(tx, params),
            tx=tx,
            apply_fn=apply_fn,
            runtime=runtime,
            config_json=config,
        )
        return saved.restore(like)[1]


def read_about(folder: str | Path, runtime: Runtime | None = None) -> tuple[str, Runtime]:
    """The config.json and the runtime (unless given) of a saved state.

    Raises:
        CheckpointError: no state is there.
    """
    try:
        config = (Path(folder) / CONFIG).read_text(encoding="utf-8")
        saved = (Path(folder) / FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{folder} holds no state: {error}. Expected a folder that save_state wrote."
        ) from None
    return config, runtime or Runtime.from_json(saved)


def _shapes(config_json: str, runtime: Runtime, kinds: Mapping[str, Any]) -> Any:
    """Shape, dtype and place of each weight: with dtypes by path, or else the config's."""
    raw = json.loads(config_json)
    abstract, _, _ = abstract_module(hf_config(raw))
    abstract = folded(abstract, stack_params) if runtime.folds else abstract
    one = SingleDeviceSharding(jax.devices()[0])
    default = jnp.dtype(raw.get("dtype") or np.float32)

    def described(path: str, param: Any) -> Any:
        where = one if runtime.placement is None else runtime.placement.weight(param)
        return jax.ShapeDtypeStruct(param.shape, kinds.get(path, default), sharding=where)

    params = paths(abstract, is_param)
    return rebuild(abstract, {path: described(path, x) for path, x in params.items()})


def _scalar(params: Any) -> Any:
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(jax.devices()[0]))
