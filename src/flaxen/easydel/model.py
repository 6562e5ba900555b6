"""The documented model class and its state, around a `Model`."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import jax

from flaxen.convert.dtypes import float_dtype
from flaxen.core.plain import check_names, with_values
from flaxen.core.tree import module
from flaxen.easydel.config import EasyDeLPretrainedConfig
from flaxen.easydel.names import NAMES, written
from flaxen.fresh import from_config
from flaxen.layers.runtime import Runtime
from flaxen.model import Model
from flaxen.pretrained import load
from flaxen.train.state import State, read_about


class EasyDeLFlaxPretrainedModel:
    """A `Model` under the documented names; what is not here is the model's own.

    module: parts with weights; made of the config if not given. dtype is computed in, param_dtype
    stored, precision that of products. Without `_do_init` the model is abstract until
    `init_weights`.
    """

    config_class = EasyDeLPretrainedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(
        self,
        config: Any,
        module: Any = None,
        input_shape: tuple[int, int] = (1, 1),
        seed: int = 0,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        _do_init: bool = True,
    ):
        if not isinstance(config, EasyDeLPretrainedConfig):
            config = EasyDeLPretrainedConfig(config)
        runtime = _with_dtypes(config.runtime, dtype, param_dtype, precision)
        config.model_config()
        model = from_config(config.raw, runtime=runtime, abstract=True)
        if module is not None:
            model = model.replace(module=module)
        elif _do_init:
            model = model.init_weights(seed, input_shape)
        self.config = EasyDeLPretrainedConfig(config.raw, runtime=runtime)
        self.model = model

    def __call__(self, *args: Any, **given: Any) -> Any:
        """See `Model.__call__`."""
        return self.model(*args, **given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "model" not in vars(self):
            raise AttributeError(name)
        found = getattr(self.model, name)
        return self._wrapping(found) if inspect.ismethod(found) else found

    def _wrapping(self, method: Any) -> Any:
        """The method; where it gives a Model, that under the documented names."""

        @functools.wraps(method)
        def call(*args: Any, **given: Any) -> Any:
            found = method(*args, **given)
            return self._around(found) if isinstance(found, Model) else found

        return call

    @classmethod
    def _around(cls, model: Model) -> Any:
        made = cls.__new__(cls)
        config = json.loads(model.origin.config_json)
        made.config = EasyDeLPretrainedConfig(config, runtime=model.runtime)
        made.model = model
        return made

    @property
    def params(self) -> Any:
        """The weights, as `params=` takes them."""
        return self.model.module

    @property
    def dtype(self) -> Any:
        """What is computed in."""
        stored = self.model.module.embed_tokens.weight.dtype
        return float_dtype(self.model.runtime.weights.dtype) or stored

    def init_weights(self, rng: Any, input_shape: tuple[int, int] = (1, 1)) -> Any:
        """Fill the model with fresh weights, and give them back."""
        self.model = self.model.init_weights(rng, input_shape)
        return self.params

    def to_easydel_state(self, params: Any = None, tx: Any = None) -> EasyDeLState:
        """A state at step 0, with an optax optimiser if one is given."""
        return EasyDeLState.create(
            params=self.params if params is None else params,
            tx=tx,
            apply_fn=self.__call__,
            runtime=self.model.runtime,
            config_json=self.model.origin.config_json,
        )

    def save_pretrained(self, folder: str | Path, params: Any = None, **options: Any) -> None:
        """Write a Hugging Face folder and flaxen.json. See `flaxen.export.save`."""
        self.model.replace(module=params).save(folder, runtime=True, **options)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: EasyDeLPretrainedConfig | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        **given: Any,
    ) -> EasyDeLFlaxPretrainedModel:
        """The model of a folder or a hub id; `given` are documented names and options of `load`."""
        if config is None:
            config = EasyDeLPretrainedConfig.from_pretrained(path)
        runtime = written(config.runtime, {n: given.pop(n) for n in NAMES if n in given})
        runtime = _with_dtypes(runtime, dtype, param_dtype, precision)
        check_names(given, {*NAMES, *inspect.signature(load).parameters}, "from_pretrained")
        return cls._around(load(path, runtime=runtime, **given))

    def __repr__(self) -> str:
        return repr(self.model)


AutoEasyDeLModelForCausalLM = EasyDeLFlaxPretrainedModel
"""Every family has the same class here."""


@module
class EasyDeLState(State):
    """`flaxen.train.state.State`, whose `apply_fn` is a model of its own config."""

    @classmethod
    def load_state(
        cls, folder: str | Path, tx: Any = None, runtime: Runtime | None = None
    ) -> EasyDeLState:
        """What `save_state` wrote last, ready to go on. See `State.restored`."""
        config, how = read_about(folder, runtime)
        documented = EasyDeLPretrainedConfig(json.loads(config), runtime=how)
        model = EasyDeLFlaxPretrainedModel(documented, _do_init=False)
        return cls.restored(folder, tx=tx, apply_fn=model.__call__, runtime=runtime)

    @property
    def model(self) -> Model:
        """A `Model` with these weights."""
        abstract = from_config(json.loads(self.config_json), runtime=self.runtime, abstract=True)
        return abstract.replace(module=self.params)


def _with_dtypes(runtime: Runtime, dtype: Any, param_dtype: Any, precision: Any) -> Runtime:
    changes: dict[str, Any] = {}
    for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        if value is not None:
            changes[f"weights.{name}"] = str(float_dtype(value))
    if precision is not None:
        named = isinstance(precision, jax.lax.Precision)
        changes["weights.precision"] = precision.name.lower() if named else precision
    return with_values(runtime, changes)
