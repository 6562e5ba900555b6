"""What a family is, and reading a config so that no key is overlooked."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxen.convert.transforms import WeightTransform
from flaxen.core.errors import ConfigError

Names = Mapping[str, Any]
Recent = deque[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """`build(config)` gives the abstract model; `names` maps our path pieces to the file's.

    `transforms` lead from other layouts that its checkpoints are found in to that of `names`.
    `base_prefix` stands before the names in files of the model with its head, and is left out in
    those of the model alone; `buffers` matches what such files hold besides weights, `spare` how
    the names of heads begin: a model with another head goes without them.
    `optional` matches names that a file may lack: such a weight is then as a fresh one.
    `fan_in_fan_out` says that its projections lie `[in, out]` in the file.
    `wide` matches names of weights that no 16-bit dtype is for, `not_half` those that float16 alone
    is not for, as Transformers lists them.
    """

    build: Callable[[Any], Any]
    names: Names
    transforms: tuple[WeightTransform, ...] = ()
    base_prefix: str = "model"
    buffers: str = r"rotary_emb\.inv_freq|position_ids"
    fan_in_fan_out: bool = False
    optional: str = r"(?!)"
    spare: str = r"(?!)"
    wide: str = r"(?!)"
    not_half: str = r"(?!)"

    def names_of(self, module: Any) -> Names:
        """The names in files of this model: without the base prefix if it has no head."""
        if not module.bare():
            return self.names
        cut = lambda name: name.removeprefix(f"{self.base_prefix}.")
        return {k: cut(v) if isinstance(v, str) else v for k, v in self.names.items()}


def family(
    families: dict[str, Family],
    model_type: str,
    names: Names,
    transforms: Sequence[WeightTransform] = (),
    **rest: Any,
) -> Callable[[Any], Any]:
    """Decorator: the function builds this model type."""

    def add(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        families[model_type] = Family(build, names, tuple(transforms), **rest)
        return build

    return add


HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "global_attn_every_n_layers",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "init_device",
        "init_std",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "repad_logits_with_grad",
        "resid_pdrop",
        "return_dict",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_theta",
        "sep_token_id",
        "sliding_window_pattern",
        "task_specific_params",
        "tie_encoder_decoder",
        "tie_weights_",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_sliding_window",
    }
)
"""Keys that do not change the numbers of a forward pass, or whose meaning the config class has
already put into other keys.
"""


class Reading:
    """A config that remembers which of its keys were read, and the last few with their values in
    `recent`, those of configs inside it too.

    Raises:
        ConfigError: when a family needs a key that the config lacks.
    """

    def __init__(self, config: Any, recent: Recent | None = None):
        self._config = config
        self.recent: Recent = deque(maxlen=6) if recent is None else recent
        self._aliases: Mapping[str, str] = type(config).attribute_map
        self._read: set[str] = set()
        self._inner: dict[str, Reading] = {}

    def __getattr__(self, key: str) -> Any:
        self._read.add(self._aliases.get(key, key))
        try:
            value = getattr(self._config, key)
        except AttributeError:
            kind = getattr(self._config, "model_type", "?")
            raise ConfigError(f"The config of this {kind} model lacks {key!r}.") from None
        self.recent.append((key, value))
        return value

    def inner(self, key: str, **changes: Any) -> Reading:
        """The config of a model inside this one, which must be read as well. changes: values of it
        that this one decides.
        """
        config = copy.copy(getattr(self, key))
        for name, value in changes.items():
            setattr(config, name, value)
        self._inner[key] = found = Reading(config, self.recent)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """A key that not every config has, or whose None means the default."""
        self._read.add(self._aliases.get(key, key))
        value = getattr(self._config, key, None)
        self.recent.append((key, value))
        return default if value is None else value

    def unread(self) -> dict[str, Any]:
        """Keys that the family did not read although they differ from the class's defaults and may
        change the numbers.
        """
        ours, defaults = self._config.to_dict(), type(self._config)().to_dict()
        here = {
            key: value
            for key, value in ours.items()
            if key not in self._read
            and key not in HARMLESS
            and not key.startswith("_")
            and value != defaults.get(key)
        }
        return here | self._of_inner(Reading.unread)

    def _of_inner(self, unread: Callable[[Reading], dict[str, Any]]) -> dict[str, Any]:
        pairs = ((k, inner) for k, inner in self._inner.items())
        return {f"{k}.{name}": x for k, inner in pairs for name, x in unread(inner).items()}

    def unread_known(self) -> dict[str, Any]:
        """Those unread keys that have a meaning for every model, or that the config class itself
        declares: ignoring one would give wrong numbers.
        """
        known = {*type(self._config)().to_dict(), "quantization_config"}
        here = {key: value for key, value in self.unread().items() if key in known}
        return here | self._of_inner(Reading.unread_known)
