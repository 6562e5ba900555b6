"""Router logits and their loss against Transformers (conformance/make_router_losses.py)."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import jax
import numpy as np
import pytest
from golden_meshes import marked
from safetensors.numpy import load_file

import flaxen
from flaxen.core.errors import InputError
from flaxen.layers.checkpointing import Checkpointing
from flaxen.layers.runtime import MLPSettings, Runtime

FILES = golden.DATA / "routers"
CASES = sorted(path.stem for path in FILES.glob("*.npz"))
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
WAYS = {
    "mixtral": Runtime(scan_layers=True, checkpointing=Checkpointing("block")),
    "qwen3_moe": Runtime(mlp=MLPSettings(scan=True, chunk=5)),
    "gpt_oss": Runtime(scan_layers=True),
    "jamba": Runtime(checkpointing=Checkpointing("block")),
}
"""With gradients, run in ways in which scores have to leave scans and what is computed again."""


def loaded(name: str, folder: Path, keys: dict, **options) -> tuple[golden.Case, flaxen.Model]:
    case = golden.case(name)
    path = golden.write_folder(case, folder)
    (path / "config.json").write_text(json.dumps(case.config | keys))
    return case, flaxen.load(path, **options)


def truth(name: str) -> dict[str, np.ndarray]:
    with np.load(FILES / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def given(case: golden.Case) -> tuple:
    return case.arrays["input_ids"], case.arrays["attention_mask"], case.position_ids


def compare(case: golden.Case, out, want: dict[str, np.ndarray]) -> None:
    keep = case.arrays["attention_mask"].reshape(-1, 1)
    assert len(out.router_logits) == len(want["router_logits"])
    for got, scores in zip(out.router_logits, want["router_logits"], strict=True):
        np.testing.assert_allclose(got * keep, scores, atol=1e-4)
    np.testing.assert_allclose(out.aux_loss, want["aux_loss"], atol=1e-5)
    np.testing.assert_allclose(out.loss, want["loss"], atol=1e-5)


@pytest.mark.parametrize("name", marked(name for name in CASES if name not in WAYS))
def test_scores_and_losses_where_the_config_asks(name, tmp_path):
    case, model = loaded(name, tmp_path, ASKED)
    compare(case, model(*given(case), labels=case.arrays["labels"]), truth(name))


@pytest.mark.parametrize("name", marked(WAYS))
def test_gradients_with_the_loss_of_routers(name, tmp_path):
    case, model = loaded(name, tmp_path, ASKED, runtime=WAYS[name])

    @jax.jit
    def run(model):
        def loss(model):
            out = model(*given(case), labels=case.arrays["labels"])
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (_, out), grads = run(model)
    want = truth(name)
    compare(case, out, want)
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for key in (key for key in want if key.startswith("norm:")):
        got = np.linalg.norm(hub[key.removeprefix("norm:")])
        assert got == pytest.approx(want[key], rel=1e-3), key


def test_the_loss_alone_has_it_too(tmp_path):
    case, model = loaded("mixtral", tmp_path, ASKED)
    ids, mask, positions = given(case)
    loss = model.loss(ids, case.arrays["labels"], mask, positions)
    np.testing.assert_allclose(loss, truth("mixtral")["loss"], atol=1e-5)


def test_a_call_asks_whatever_the_config_says(tmp_path):
    case, model = loaded("mixtral", tmp_path, {"router_aux_loss_coef": 0.5})
    labels = case.arrays["labels"]
    plain = model(*given(case), labels=labels)
    assert plain.router_logits is plain.aux_loss is None
    np.testing.assert_allclose(plain.loss, case.arrays["loss"], atol=1e-5)
    asked = model(*given(case), labels=labels, output_router_logits=True)
    compare(case, asked, truth("mixtral"))
    loss, aux, logits, *_, scores = asked.to_tuple()
    assert (loss, aux, logits, scores) == (
        asked.loss,
        asked.aux_loss,
        asked.logits,
        asked.router_logits,
    )


def test_a_z_loss_is_the_mean_square_of_log_sums(tmp_path):
    case, model = loaded("mixtral", tmp_path, ASKED | {"router_z_loss_coef": 0.25})
    out = model(*given(case), labels=case.arrays["labels"])
    want = truth("mixtral")
    keep = case.arrays["attention_mask"].reshape(-1) == 1
    scores = want["router_logits"][:, keep].astype(float)
    z = np.log(np.exp(scores).sum(-1)) ** 2
    np.testing.assert_allclose(out.loss, want["loss"] + 0.25 * z.mean(), atol=1e-4)


def test_a_model_without_experts_has_no_routers(tmp_path):
    case, model = loaded("llama", tmp_path, {})
    with pytest.raises(InputError, match="no experts to choose from"):
        model(*given(case), output_router_logits=True)


def test_with_a_cache_there_are_logits_alone(tmp_path):
    case, model = loaded("mixtral", tmp_path, {})
    cache = model.init_cache(3, 20)
    with pytest.raises(InputError, match="output_router_logits cannot be used"):
        model(case.arrays["input_ids"], past_key_values=cache, output_router_logits=True)


def test_a_family_without_such_a_loss_still_gives_scores(tmp_path):
    case, model = loaded("deepseek_v3", tmp_path, {})
    out = model(*given(case), labels=case.arrays["labels"], output_router_logits=True)
    assert out.aux_loss is None
    assert {scores.shape[0] for scores in out.router_logits} == {case.arrays["input_ids"].size}
    np.testing.assert_allclose(out.loss, case.arrays["loss"], atol=1e-5)
