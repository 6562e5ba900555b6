"""Reading `modules.json`, which says how a sentence-transformers folder makes vectors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.formats.checkpoint import open_checkpoint, parse_json, read_json
from flaxen.core.checks import at_least, of_kind, true_or_false
from flaxen.core.errors import CheckpointError, ConfigError, InputError, did_you_mean
from flaxen.embed.steps import POOLINGS, Dense, Normalize, Pool
from flaxen.layers.linear import Linear

FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

ACTS = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""torch's names of activations -> ours."""


MEAN = Pool(ways=(POOLINGS["mean"],))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How texts become vectors.

    pool, then steps; prompts: what may be put before a text, by name; default: the name of the one
    that is, unless another is asked for; max_length: in tokens; lower: texts are lowered first;
    prompt_counts: whether the tokens of a prompt are pooled like the others.
    """

    pool: Pool = MEAN
    steps: tuple[Any, ...] = ()
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default: str | None = None
    max_length: int | None = None
    lower: bool = False
    prompt_counts: bool = True

    def prompt(self, text: str | None, name: str | None) -> str:
        """What stands before every text: `text`, or what is stored under `name`.

        Raises:
            InputError: both, or a name that there is not.
            ConfigError: a prompt whose tokens are to be left out of the pooling.
        """
        if text is not None and name is not None:
            raise InputError("Both prompt and prompt_name are given; leave one out.")
        name = self.default if name is None else name
        if text is None and name is not None and name not in self.prompts:
            known = (
                did_you_mean(name, self.prompts) or " This model has none; pass the text itself."
            )
            raise InputError(f"There is no prompt {name!r}.{known}")
        found = text if text is not None else self.prompts[name] if name is not None else ""
        if found and not self.prompt_counts:
            raise ConfigError(
                "This model's pooling leaves the tokens of a prompt out (include_prompt=false), "
                "which is not handled. Pass prompt='' to embed texts alone."
            )
        return found


@functools.lru_cache(maxsize=8)
def recipe_of(folder: Path) -> Recipe:
    """The recipe of a folder, or of the one around it if this is its Transformer; without
    modules.json the mean of all tokens.

    Raises:
        ConfigError: a module or setting that is not known here.
        CheckpointError: a file that is damaged or absent.
    """
    root = _root(folder)
    if root is None:
        return Recipe()
    kinds = [(str(m.get("type", "")).rpartition(".")[2], m) for m in _modules(root)]
    if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"]:
        raise ConfigError(
            f"{root / 'modules.json'} lists {[kind for kind, _ in kinds]}; expected a Transformer, "
            "a Pooling, and then Dense and Normalize."
        )
    pooling = read_json(root / _path(kinds[1][1]) / "config.json")
    about = _optional(root / "config_sentence_transformers.json")
    length, lower = _limits(root / _path(kinds[0][1]))
    prompts, default = _prompts(about)
    return Recipe(
        pool=_pool(pooling),
        steps=tuple(_step(root / _path(m), kind) for kind, m in kinds[2:]),
        prompts=prompts,
        default=default,
        max_length=length,
        lower=lower,
        prompt_counts=bool(pooling.get("include_prompt", True)),
    )


def _root(folder: Path) -> Path | None:
    for root in (folder, folder.parent):
        if (root / "modules.json").is_file():
            inner = _path(_modules(root)[0]) if _modules(root) else ""
            if (root / inner).resolve() == folder.resolve():
                return root
    return None


def _modules(root: Path) -> list[dict[str, Any]]:
    file = root / "modules.json"
    listed = parse_json(b'{"modules": ' + file.read_bytes() + b"}", file)["modules"]
    if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
        raise CheckpointError(f"{file} is no list of modules. Fetch it again.")
    return listed


def _path(part: Mapping[str, Any]) -> str:
    path = part.get("path", "")
    if (
        not isinstance(path, str)
        or "\0" in path
        or Path(path).is_absolute()
        or ".." in Path(path).parts
    ):
        raise CheckpointError(f"modules.json names the path {path!r}; expected a folder inside.")
    return path


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _limits(folder: Path) -> tuple[int | None, bool]:
    for file in sorted(folder.glob("sentence_*_config.json")):
        found = read_json(file)
        length, lower = found.get("max_seq_length"), found.get("do_lower_case", False)
        if length is not None:
            at_least(f"max_seq_length of {file.name}", length, 1)
        true_or_false(**{f"do_lower_case of {file.name}": lower})
        return length, lower
    return None, False


def _prompts(about: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The texts by name, and the name of the one that is put before others by itself."""
    found, default = about.get("prompts") or {}, about.get("default_prompt_name")
    of_kind(prompts=(found, dict), default_prompt_name=(default, str | None))
    of_kind(**{f"prompt {name!r}": (text, str) for name, text in found.items()})
    return found, default


def _pool(config: Mapping[str, Any]) -> Pool:
    asked = config.get("pooling_mode")
    if asked is None:
        names = [name for flag, name in FLAGS.items() if config.get(flag)]
    else:
        names = asked if isinstance(asked, list) else [asked]
    strange = [flag for flag, on in config.items() if on is True and flag not in FLAGS]
    odd = [name for name in names if not isinstance(name, str) or name not in POOLINGS]
    odd += [flag for flag in strange if flag.startswith("pooling_mode")]
    if odd or not names:
        raise ConfigError(f"Pooling by {odd or names}; expected some of {', '.join(POOLINGS)}.")
    return Pool(ways=tuple(way for name, way in POOLINGS.items() if name in names))


def _step(folder: Path, kind: str) -> Any:
    if kind == "Normalize":
        return Normalize()
    if kind != "Dense":
        raise ConfigError(f"modules.json lists a {kind}; only Dense and Normalize are known here.")
    config = read_json(folder / "config.json")
    act = str(config.get("activation_function", "Tanh")).rpartition(".")[2].removesuffix("()")
    if act not in ACTS:
        raise ConfigError(f"A Dense has the activation {act!r}.{did_you_mean(act, ACTS)}")
    with open_checkpoint(folder) as tensors:
        found = {name: np.array(tensor.read()) for name, tensor in tensors.items()}
    return Dense(linear=_linear(folder, found, bool(config.get("bias", True))), act=ACTS[act])


def _linear(folder: Path, found: Mapping[str, np.ndarray], biased: bool) -> Linear:
    """
    Raises:
        CheckpointError: other tensors than its config says, or of shapes that do not fit.
    """
    names = ["linear.bias", "linear.weight"] if biased else ["linear.weight"]
    if sorted(found) != names:
        raise CheckpointError(f"{folder} holds {sorted(found)}; expected {names}.")
    weight, bias = found["linear.weight"], found.get("linear.bias")
    shapes = {name: x.shape for name, x in found.items()}
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise CheckpointError(
            f"{folder} holds {shapes}; expected (outputs, inputs) and (outputs,)."
        )
    return Linear(weight=weight, bias=bias)
