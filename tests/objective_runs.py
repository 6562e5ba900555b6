"""Tiny models of a few words, and runs of any objective on records that are written out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from words import word_tokenizer

from flaxen.core.tree import paths
from flaxen.model import Model
from flaxen.pretrained import from_config
from flaxen.train import OBJECTIVES, TrainConfig
from flaxen.train.data.records import Record
from flaxen.train.step import make_trainer, place_batch, trained_tree
from flaxen.tune import add_lora

VOCAB, T = 24, 8
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 2,
}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCAB + 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}


@functools.cache
def model(base: str = "llama", head: str = "", labels: int = 2, mesh: str | None = None) -> Model:
    """A fresh model of one layer, with another head if asked: `ForSequenceClassification`."""
    config = LLAMA if base == "llama" else BERT
    prefix = "Llama" if base == "llama" else "Bert"
    more = {"architectures": [f"{prefix}{head}"], "num_labels": labels} if head else {}
    return from_config(config | more, mesh=mesh)


@functools.cache
def teacher(mesh: str | None = None) -> Model:
    """A wider one, with other weights."""
    return from_config(LLAMA | {"hidden_size": 32}, seed=1, mesh=mesh)


@functools.cache
def tok() -> Any:
    found = word_tokenizer(VOCAB)
    found.add_special_tokens({"mask_token": "<mask>"})
    return found


def records(*fields: dict[str, Any]) -> list[Record]:
    return [Record(f"a.jsonl:{i}", one) for i, one in enumerate(fields, 1)]


def settings(name: str, **more: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "seq_len": T,
        "batch_size": 2,
        "schedule": "constant",
        "learning_rate": 0.02,
    }
    return TrainConfig(output="unused", objective=name, **plain | {"clip": None} | more)


class Run:
    """An objective on records: its rows of numbers, its model before and after."""

    def __init__(
        self,
        name: str,
        model: Model,
        *fields: dict[str, Any],
        steps: int = 0,
        reference: Model | None = None,
        lora: int | None = None,
        **more: Any,
    ):
        config = settings(name, **more)
        if (how := config.checkpointing()) is not None:
            model = model.replace(runtime=dataclasses.replace(model.runtime, checkpointing=how))
        self.model, self.objective = model, OBJECTIVES[name](config, tok())
        self.objective.check(model.module)
        self.objective.begin(model, reference)
        self.source = self.objective.source(tok(), records(*fields), config.accumulation)
        self.tree = model.module if lora is None else add_lora(model.module, rank=lora)
        self.trainer, self.state = make_trainer(
            self.tree,
            model.runtime,
            config,
            max(steps, 1),
            objective=self.objective,
            reference=None if reference is None else reference.module,
        )
        self.rows: list[dict[str, Any]] = []
        self.step(steps)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            batch = place_batch(self.source.batch_at(len(self.rows)), self.model.runtime)
            self.state, told = self.trainer.step(self.state, self.trainer.frozen, batch)
            self.rows.append(told)

    def row(self, step: int) -> dict[str, float]:
        """What a step told, before it changed anything."""
        return {key: float(x) for key, x in self.rows[step].items()}

    def told(self) -> dict[str, float]:
        """The means over the first batch, as the model is now; nothing is trained for it."""
        batch = {k: x[:1] for k, x in self.source.batch_at(0).items()}
        placed = place_batch(batch, self.model.runtime)
        loss, told, weight = self.trainer.evaluate(self.state, self.trainer.frozen, placed)
        means = {key: float(x) / float(weight) for key, x in {"loss": loss, **told}.items()}
        return means | {"weight": float(weight)}

    def weights(self) -> dict[str, np.ndarray]:
        """Of the trained model, by path."""
        tree = trained_tree(self.state, self.tree)
        return {path: np.asarray(x) for path, x in paths(tree).items()}

    def gradient(self) -> dict[str, np.ndarray]:
        """What one step of plain descent at the rate of 1 took off each weight."""
        assert self.objective.config.optimizer == "sgd"
        before = self.weights()
        kept = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), self.state)
        batch = place_batch(self.source.batch_at(0), self.model.runtime)
        after, told = self.trainer.step(kept, self.trainer.frozen, batch)
        tree = trained_tree(after, self.tree)
        self.rows.append(told)
        return {path: before[path] - np.asarray(x) for path, x in paths(tree).items()}
