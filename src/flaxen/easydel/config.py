"""A Hugging Face config and how its model is run: one object, two halves, two files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.plain import check_names, differences
from flaxen.easydel import names
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.rope_keys import both_spellings
from flaxen.layers.runtime import FILE, Runtime
from flaxen.models.fold import folded, stack_params
from flaxen.pretrained import load
from flaxen.running import read_runtime
from flaxen.shard import PLANS, Placement, Plan
from flaxen.shard.rules import PartitionRules, partition_rules


class EasyDeLPretrainedConfig:
    """The documented flat names are read and set in `runtime`, all others in `hf`, the config of
    `transformers`.

    `config` is such an object or a dict with a `model_type`; `names` are of either half.

    Raises:
        ConfigError: a name that neither half knows, with the nearest one that is known.
    """

    hf: Any
    runtime: Runtime

    def __init__(self, config: Any = None, *, runtime: Runtime = names.DEFAULT, **given: Any):
        ours = {name: given.pop(name) for name in names.NAMES if name in given}
        raw = {} if config is None else _raw(config)
        if "model_type" in given:
            raw["model_type"] = given.pop("model_type")
        hf = hf_config(raw) if raw else None
        known = (*names.NAMES, *hf.to_dict(), *hf.attribute_map) if hf else names.NAMES
        check_names(given, known, type(self).__name__)
        raw |= given
        vars(self).update(
            raw=raw, hf=hf_config(raw) if raw else None, runtime=names.written(runtime, ours)
        )

    def __getattr__(self, name: str) -> Any:
        if name in names.NAMES:
            return names.read(self.runtime, name)
        if name.startswith("__") or vars(self).get("hf") is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it was given no model.")
        try:
            return getattr(self.hf, name)
        except AttributeError:
            known = (*names.NAMES, *self.hf.to_dict())
            raise AttributeError(f"There is no {name!r} here.{did_you_mean(name, known)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in names.NAMES:
            self.add_jax_args(**{name: value})
        elif name in vars(self):
            vars(self)[name] = value
        else:
            changed = EasyDeLPretrainedConfig(self.raw, **{name: value})
            vars(self).update(raw=changed.raw, hf=changed.hf)

    def add_jax_args(self, **given: Any) -> None:
        """Set exactly these names and keep all others."""
        vars(self)["runtime"] = names.written(self.runtime, given)

    add_basic_configurations = add_jax_args

    def create_mesh(self) -> jax.sharding.Mesh:
        """The mesh, on the devices of `backend`; nothing is put there."""
        return names.mesh_of(self.runtime).build()

    jax_mesh = create_mesh

    def get_axis_dims(self) -> tuple[int, ...]:
        """The sizes of the mesh on the devices that are here."""
        return names.mesh_of(self.runtime).get_axis_dims()

    def get_axis_names(self) -> tuple[str, ...]:
        return self.axis_names

    def get_backend(self) -> str:
        """The backend's name, jax's own choice unless one was named."""
        return self.backend or jax.default_backend()

    def get_partition_rules(self, fully_sharded_data_parallel: bool = True) -> PartitionRules:
        """(regex, PartitionSpec) for each kind of weight; what does not divide is told in a
        warning and stays whole.
        """
        weights = PLANS["auto" if fully_sharded_data_parallel else "tp"].weights
        spec = names.mesh_of(self.runtime)
        placement = Placement(spec.build(), Plan(weights, PLANS["auto"].activations))
        abstract, _, _ = abstract_module(self.model_config())
        abstract = folded(abstract, stack_params) if self.runtime.folds else abstract
        for note in placement.all_uncut(abstract):
            warnings.warn(f"{note}: whole on every device", stacklevel=2)
        return partition_rules(abstract, placement)

    def model_config(self) -> Any:
        """The Hugging Face half.

        Raises:
            ConfigError: there is none.
        """
        if self.hf is None:
            raise ConfigError(
                "This config describes no model; give it a model_type, a config of transformers, "
                "or use EasyDeLPretrainedConfig.from_pretrained."
            )
        return self.hf

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, Hugging Face's own, and flaxen.json."""
        self.model_config()
        runtime = self.runtime.to_json()
        Path(folder).mkdir(parents=True, exist_ok=True)
        config = json.dumps(both_spellings(self.raw), indent=2, default=str)
        (Path(folder) / "config.json").write_text(config + "\n", encoding="utf-8")
        (Path(folder) / FILE).write_text(runtime + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, path: str | Path, **given: Any) -> EasyDeLPretrainedConfig:
        """The config of a folder or a hub id, with the runtime that lies beside it, if any."""
        file = Path(path) / "config.json"
        if file.is_file():
            raw = json.loads(file.read_text(encoding="utf-8"))
        else:
            raw = json.loads(load(path, abstract=True).origin.config_json)
        beside = (Path(path) / FILE).is_file()
        return cls(raw, runtime=read_runtime(path) if beside else names.DEFAULT, **given)

    def __repr__(self) -> str:
        """One line for each field that differs from its default."""
        changed = differences(self.runtime, names.DEFAULT)
        lines = [f"    {name} = {value!r}" for name, value in changed]
        return "\n".join([f"EasyDeLPretrainedConfig({self.raw.get('model_type')})", *lines])


def _raw(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, dict) else config.to_dict()


AutoEasyDeLConfig = EasyDeLPretrainedConfig
"""Every family has the same class here."""
