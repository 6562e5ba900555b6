"""Training adds the loss of routers where a config asks for it; evaluation never does."""

from __future__ import annotations

import json

import golden
import jax
import numpy as np
import pytest

import flaxen
from flaxen.train.settings import TrainConfig
from flaxen.train.step import make_trainer

T = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    case, folder = golden.case("mixtral"), tmp_path_factory.mktemp("mixtral")
    golden.write_folder(case, folder)
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    (folder / "config.json").write_text(json.dumps(case.config | asked))
    return flaxen.load(folder)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Ids and a mask that is 0 after each row's end."""
    mask = (np.arange(T) < np.array([[12], [7], [3], [9]])).astype(np.int32)
    ids = np.random.default_rng(0).integers(3, 60, (4, T)).astype(np.int32)
    return ids * mask, mask


def batch(micro: int) -> dict[str, np.ndarray]:
    ids, mask = rows()
    targets = np.pad(np.where(mask, ids, -100)[:, 1:], [(0, 0), (0, 1)], constant_values=-100)
    return {"ids": ids.reshape(micro, -1, T), "targets": targets.reshape(micro, -1, T)}


def expected(model, micro: int) -> float:
    """Each micro-batch counts by its targets; its padding is no token of an expert's."""
    ids, mask = rows()
    total = count = 0.0
    for i, m in zip(np.split(ids, micro), np.split(mask, micro), strict=True):
        targets = m[:, 1:].sum()
        total += targets * model(i, m, labels=np.where(m, i, -100)).loss
        count += targets
    return float(total / count)


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_step_has_the_loss_of_routers_in_its_mean(model, micro):
    trainer, state = make_trainer(model.module, model.runtime, TrainConfig(output="unused"), 10)
    given = jax.device_put(batch(micro))
    _, metrics = trainer.step(state, trainer.frozen, given)
    assert float(metrics["loss"]) == pytest.approx(expected(model, micro), abs=1e-5)


def test_evaluation_measures_the_text_alone(model):
    trainer, state = make_trainer(model.module, model.runtime, TrainConfig(output="unused"), 10)
    total, _, count = trainer.evaluate(state, trainer.frozen, jax.device_put(batch(1)))
    ids, mask = rows()
    out = model(ids, mask, labels=np.where(mask, ids, -100))
    assert float(total / count) == pytest.approx(float(out.loss - 0.5 * out.aux_loss), abs=1e-5)
    assert float(out.aux_loss) > 1


def test_packed_rows_have_their_padding_in_no_segment(model):
    mask = rows()[1]
    given = batch(1) | {"segments": mask[None], "positions": np.arange(T)[None, None] * mask[None]}
    trainer, state = make_trainer(model.module, model.runtime, TrainConfig(output="unused"), 10)
    _, metrics = trainer.step(state, trainer.frozen, jax.device_put(given))
    assert float(metrics["loss"]) == pytest.approx(expected(model, 1), abs=1e-5)
