"""Models to generate with: the golden ones, and one whose next token is written down."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
from transformers import CONFIG_MAPPING

from flaxen.core.tree import is_param, paths
from flaxen.families import find
from flaxen.families.family import Reading
from flaxen.layers.context import Runtime


@dataclasses.dataclass
class Tiny:
    """What generation needs of a model."""

    module: Any
    runtime: Runtime = dataclasses.field(default_factory=Runtime)
    config: Any = dataclasses.field(default_factory=SimpleNamespace)
    generation_config: dict[str, Any] | None = None


@functools.cache
def model(name: str = "llama") -> Tiny:
    """A golden case, without its EOS ids."""
    case = golden.case(name)
    family = find(case.about["model_type"])
    settings = {k: v for k, v in case.config.items() if k != "model_type"}
    abstract = family.build(Reading(CONFIG_MAPPING[case.about["model_type"]](**settings)))
    names = sorted(family.names, key=len, reverse=True)
    words = re.compile(rf"(?:^|(?<=\.))({'|'.join(map(re.escape, names))})(?=\.|$)")
    leaves = [
        jnp.asarray(case.weights[words.sub(lambda m: family.names[m[0]], path)].reshape(p.shape))
        for path, p in paths(abstract, is_param).items()
    ]
    return Tiny(jax.tree.unflatten(jax.tree.structure(abstract, is_leaf=is_param), leaves))


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 128, (rows, length), dtype=np.int32)
