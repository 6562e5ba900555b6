"""Another head than a checkpoint was trained with: which class of Transformers a task asks for, and
decoders that classify.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.hugging_face import transformers
from flaxen.layers.linear import linear
from flaxen.models.classifiers import known_problem
from flaxen.models.decoder import Decoder
from flaxen.models.decoder_classifier import DecoderClassifier

ROWS = "ForSequenceClassification"
TASKS = {"sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"}
"""Names of tasks -> Transformers' table of their classes by model type."""


def asked(raw: Mapping[str, Any], task: str, labels: int | Sequence[str]) -> dict[str, Any]:
    """What a config.json says of a model for a task. labels: how many there are, or their names.

    Raises:
        ConfigError: an unknown task, a family that has no such model, or no label.
    """
    if task not in TASKS:
        raise ConfigError(f"task is {task!r}; expected {', '.join(TASKS)}.")
    names = [f"LABEL_{i}" for i in range(labels)] if isinstance(labels, int) else list(labels)
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ConfigError(f"num_labels is {labels!r}; expected a number from 1 on, or their names.")
    # Transformers' own front door to this table asks for torch; its file does not.
    transformers()
    table = getattr(importlib.import_module("transformers.models.auto.modeling_auto"), TASKS[task])
    name = table.get(raw.get("model_type"))
    if name is None:
        raise ConfigError(
            f"Transformers has no model of type {raw.get('model_type')!r} for {task}, so there "
            "would be nothing to save it as."
        )
    return {
        "architectures": [name],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def with_head(module: Any, config: Any) -> Any:
    """The model that `architectures` asks for: of a decoder, perhaps one that classifies rows.

    Raises:
        ConfigError: a decoder of another kind, which cannot.
    """
    name = next(iter(config.architectures or ()), "")
    if not isinstance(module, Decoder) or not name.endswith(ROWS):
        return module
    if type(module) is not Decoder:
        raise ConfigError(f"{name} is not handled here: this family's decoders cannot classify.")
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    table = dataclasses.replace(module.embed_tokens, bias=None)
    width = table.weight.axes["embed"]
    return DecoderClassifier(
        **fields | {"lm_head": None, "embed_tokens": table},
        score=linear({"embed": width}, {"labels": config.num_labels}),
        pad=getattr(config, "pad_token_id", None),
        problem=known_problem(getattr(config, "problem_type", None)),
    )
