"""Rewards, labels, distillation, embeddings, hidden tokens: closed forms, and known optima."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_runs import BERT, VOCAB, Run, model, records, settings, teacher, tok

from flaxen.core.errors import InputError
from flaxen.pretrained import from_config
from flaxen.train import OBJECTIVES
from flaxen.train.objectives.distillation import divergence
from flaxen.train.objectives.embedding import contrasted
from flaxen.train.run.evaluate import mean_losses

TRL = json.loads((golden.DATA / "objectives.json").read_text())
ROWS = "ForSequenceClassification"
PAIR = {"prompt": "a b", "chosen": "c d", "rejected": "user"}
OTHER = {"prompt": "b", "chosen": "d", "rejected": "a c b"}
TEXTS = ({"text": "a b c", "label": 0}, {"text": "d user", "label": 1}, {"text": "c", "label": 1})
MESH = "fsdp=2,dp=2"
DESCENT = {"optimizer": "sgd", "learning_rate": 1.0}


def same_gradient(name: str, one, meshed, *fields, taught=lambda mesh=None: None, **more) -> None:
    """Three rows as one batch of four, and as uneven micro-batches on a mesh with remat."""
    whole = Run(name, one, *fields, batch_size=4, reference=taught(), **DESCENT, **more)
    want = whole.gradient()
    about = {"batch_size": 2, "accumulation": 2, "remat": True, "reference": taught(MESH)}
    parts = Run(name, meshed, *fields, **about, **DESCENT, **more)
    got = parts.gradient()
    np.testing.assert_allclose(parts.rows[0]["loss"], whole.rows[0]["loss"], rtol=1e-5)
    for path, change in want.items():
        np.testing.assert_allclose(got[path], change, atol=2e-5, err_msg=path)


def test_a_reward_model_tells_the_better_answer():
    """Bradley and Terry's loss is -log sigmoid of the difference of two scores: 0 at best."""
    run = Run("reward", model("llama", ROWS, 1), PAIR, OTHER, steps=40)
    first, last = run.row(0), run.row(-1)
    assert first["loss"] > 0.1
    assert last["loss"] < 0.02
    assert last["rewards/accuracies"] == 1
    np.testing.assert_allclose(
        last["rewards/margins"], last["rewards/chosen"] - last["rewards/rejected"], rtol=1e-4
    )


def test_the_loss_of_one_reward_is_that_of_its_scores():
    """With a centre of 0.1: -log sigmoid(c - r) + 0.1 (c + r)^2."""
    told = Run("reward", model("llama", ROWS, 1), PAIR, center_rewards_coefficient=0.1).told()
    c, r = told["rewards/chosen"], told["rewards/rejected"]
    want = np.log1p(np.exp(r - c)) + 0.1 * (c + r) ** 2
    np.testing.assert_allclose(told["loss"], want, rtol=1e-5)


@pytest.mark.parametrize("base", ["llama", "bert"])
def test_labels_that_can_be_told_are_learned(base: str):
    run = Run("classification", model(base, ROWS, 2), *TEXTS, steps=40, batch_size=4)
    assert run.rows[0]["tokens"] == 3
    last = run.row(-1)
    assert last["loss"] < 0.02
    assert last["accuracy"] == 1


def test_labels_that_contradict_each_other_end_at_their_entropy():
    """One text with the labels 0, 0, 0, 1: the least cross entropy is H(1/4)."""
    same = [{"text": "a b", "label": int(i == 3)} for i in range(4)]
    last = Run("classification", model("llama", ROWS, 2), *same, steps=60, batch_size=4).row(-1)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    np.testing.assert_allclose(last["loss"], entropy, atol=2e-3)
    assert last["accuracy"] == 0.75


def test_padding_and_its_id_change_no_score():
    """The same text in longer rows, alone and among empty rows."""
    short = Run("classification", model("llama", ROWS, 2), TEXTS[0], seq_len=4, batch_size=1).told()
    long = Run("classification", model("llama", ROWS, 2), TEXTS[0], seq_len=8, batch_size=4).told()
    np.testing.assert_allclose(short["loss"], long["loss"], rtol=1e-5)
    assert long["weight"] == 1


def test_the_head_is_trained_in_full_beside_adapters():
    head = model("llama", ROWS, 2)
    run = Run("classification", head, *TEXTS, steps=30, batch_size=4, lora=2)
    before = head.parameters()
    moved = {
        path
        for path, weight in run.weights().items()
        if path in before and not np.array_equal(weight, before[path])
    }
    assert moved == {"score.weight"}
    assert run.row(-1)["loss"] < 0.1


@pytest.mark.exhaustive
def test_micro_batches_meshes_and_remat_change_no_gradient_of_labels():
    one, meshed = (model("llama", ROWS, 2, mesh) for mesh in (None, MESH))
    same_gradient("classification", one, meshed, *TEXTS)


@pytest.mark.exhaustive
def test_micro_batches_meshes_and_remat_change_no_gradient_of_a_student():
    texts = [{"text": "a b c d"}, {"text": "d d"}, {"text": "user"}]
    same_gradient("distillation", model(), model(mesh=MESH), *texts, packing=False, taught=teacher)


def test_models_and_records_that_cannot_are_refused():
    with pytest.raises(InputError, match="task='sequence-classification'"):
        Run("classification", model(), TEXTS[0])
    with pytest.raises(InputError, match="num_labels=1"):
        Run("reward", model("llama", ROWS, 2), PAIR)
    with pytest.raises(InputError, match=r"a\.jsonl:1: 'label' is 5; the model has 2"):
        Run("classification", model("llama", ROWS, 2), {"text": "a", "label": 5})


def test_divergences_are_those_of_trl():
    """Of GKD at a temperature of 1.7, in float64 there; our beta is its beta."""
    of = lambda key: jax.nn.log_softmax(jnp.float32(TRL[key]) / 1.7)
    for beta, want in TRL["jsd"].items():
        got = divergence(of("student"), of("teacher"), float(beta))
        np.testing.assert_allclose(got, want, rtol=2e-5)


def test_a_student_becomes_its_teacher():
    """Every divergence is 0 where both say the same, and nowhere else."""
    texts = [{"text": "a b c d"}, {"text": "d d"}]
    run = Run(
        "distillation",
        model(),
        *texts,
        reference=teacher(),
        steps=80,
        distillation_beta=0.5,
        distillation_temperature=2.0,
    )
    assert run.row(-1)["divergence"] < 0.03 * run.row(0)["divergence"]


def test_the_data_weighs_as_much_as_it_is_told():
    about = {"reference": teacher(), "distillation_alpha": 0.25}
    told = Run("distillation", model(), {"text": "a b c d"}, **about).told()
    want = 0.75 * told["divergence"] + 0.25 * told["cross_entropy"]
    np.testing.assert_allclose(told["loss"], want, rtol=1e-5)
    causal = Run("causal", model(), {"text": "a b c d"}).told()
    np.testing.assert_allclose(told["cross_entropy"], causal["loss"], rtol=1e-5)


def test_divergence_of_models_is_that_of_their_logits():
    run = Run("distillation", model(), {"text": "a b c d"}, reference=teacher())
    batch = run.source.batch_at(0)
    ids, counted = batch["ids"][0], batch["targets"][0] != -100
    wide = [np.asarray(m(ids).logits, np.float64) for m in (model(), teacher())]
    s, t = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in wide)
    want = (np.exp(t) * (t - s)).sum(-1)[counted].mean()
    np.testing.assert_allclose(run.told()["loss"], want, rtol=1e-4)


def test_a_teacher_with_other_tokens_is_refused():
    other = model().resize_token_embeddings(VOCAB + 8)
    with pytest.raises(InputError, match=f"has {VOCAB} tokens and its teacher {VOCAB + 8}"):
        Run("distillation", model(), {"text": "a b"}, reference=other)
    with pytest.raises(InputError, match="reference="):
        Run("distillation", model(), {"text": "a b"})


def unit(*shape, seed=0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("symmetric", [False, True])
def test_contrast_is_the_cross_entropy_of_similarities(symmetric: bool):
    """Four rows of a query, a text and a negative; the last row is empty, the second has no
    negative.
    """
    x, real = unit(4, 3, 5), np.ones((4, 3), bool)
    real[3], real[1, 2] = False, False
    total, told = contrasted(jnp.float32(x), jnp.asarray(real), 0.1, symmetric)
    texts = [x[0, 1], x[1, 1], x[2, 1], x[0, 2], x[2, 2]]
    scores = x[:3, 0] @ np.array(texts).T / 0.1
    nll = lambda s: np.log(np.exp(s).sum(-1)) - np.diag(s)
    want = nll(scores)
    if symmetric:
        want = (want + nll(scores[:, :3].T)) / 2
    np.testing.assert_allclose(total, want.sum(), rtol=1e-5)
    assert told["accuracy"] == (scores.argmax(-1) == np.arange(3)).sum()


def test_contrast_of_empty_rows_has_a_finite_gradient():
    real = jnp.asarray(np.eye(3, 2, dtype=bool)[:, :1].repeat(2, 1))
    grad = jax.grad(lambda x: contrasted(x, real, 0.05, True)[0])(jnp.float32(unit(3, 2, 4)))
    assert np.isfinite(grad).all()


LINES = (
    {"query": "a", "positive": "b c", "negative": "d"},
    {"anchor": "c", "positive": "d b"},
    {"query": "user", "positive": "a user", "negatives": ["b", "c d"]},
)


@pytest.mark.parametrize("base", ["llama", "bert"])
def test_texts_find_their_own(base: str):
    """Cosines are 1 at most, so that with a small temperature the least loss is 0; two rows have
    negatives of their own.
    """
    run = Run("embedding", model(base), *LINES, steps=80, batch_size=4, embedding_temperature=0.1)
    last = run.row(-1)
    assert run.rows[0]["tokens"] == 3
    assert last["loss"] < 0.05 < run.row(0)["loss"]
    assert last["accuracy"] == 1


def test_two_pairs_end_at_their_least_loss():
    """Of two pairs alone the least is log(1 + exp(-2 / t)), each with cosines 1 and -1."""
    two = ({"query": "a", "positive": "b c"}, {"query": "c", "positive": "d user"})
    last = Run("embedding", model(), *two, steps=80, embedding_temperature=1.0).row(-1)
    np.testing.assert_allclose(last["loss"], math.log1p(math.exp(-2)), atol=0.01)


def test_vectors_are_those_of_embed():
    """What is compared is what `model.embed` makes of the texts."""
    from objective_runs import tok

    bert = model("bert")
    told = Run("embedding", bert, *LINES[1:2], LINES[0], embedding_temperature=1.0).told()
    queries = bert.embed(["c", "a"], tok=tok(), progress=False)
    texts = bert.embed(["d b", "b c", "d"], tok=tok(), progress=False)
    norm = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    scores = np.float64(norm(queries) @ norm(texts).T)
    want = (np.log(np.exp(scores).sum(-1)) - np.diag(scores)).mean()
    np.testing.assert_allclose(told["loss"], want, rtol=1e-4)


def test_negatives_are_those_of_all_devices():
    """Eight rows on eight devices: the loss and the gradient of eight rows on one."""
    words = ["a", "b", "c", "d", "user", "assistant", "w9", "w10"]
    lines = [{"query": w, "positive": f"{w} {words[i - 1]}"} for i, w in enumerate(words)]
    one = Run("embedding", model(), *lines, batch_size=8, **DESCENT)
    want = one.gradient()
    many = Run("embedding", model(mesh="dp=8"), *lines, batch_size=8, **DESCENT)
    got = many.gradient()
    np.testing.assert_allclose(many.rows[0]["loss"], one.rows[0]["loss"], rtol=1e-5)
    for path, change in want.items():
        np.testing.assert_allclose(got[path], change, atol=1e-4, err_msg=path)


def test_hidden_tokens_are_as_many_as_asked_and_others_in_each_step():
    text = {"text": " ".join(["a"] * 400)}
    run = Run("masked", model("bert", "ForMaskedLM"), text, batch_size=50, mlm_probability=0.3)
    batch, again = run.source.batch_at(0), run.source.batch_at(0)
    hidden = batch["targets"] != -100
    assert 0.2 < hidden.sum() / 400 < 0.4
    np.testing.assert_array_equal(batch["targets"][hidden], 4)
    read = batch["ids"][hidden]
    assert 0.65 < (read == VOCAB).mean() < 0.95
    np.testing.assert_array_equal(batch["ids"][~hidden & (batch["mask"] > 0)], 4)
    for key in batch:
        np.testing.assert_array_equal(batch[key], again[key])
    assert not np.array_equal(batch["targets"], run.source.batch_at(1)["targets"])


def test_hidden_tokens_read_as_tokens_that_the_model_has():
    """The tokenizer may know more, which would be found only when such a one is drawn."""
    source = Run("masked", model("bert", "ForMaskedLM"), {"text": "a b c"}).source
    assert source.vocab == VOCAB + 1 == model("bert").module.embed_tokens.vocab_size
    objective = OBJECTIVES["masked"](settings("masked"), tok())
    objective.check(
        from_config(BERT | {"vocab_size": 20, "architectures": ["BertForMaskedLM"]}).module
    )
    assert objective.source(tok(), records({"text": "a b c"}), 1).vocab == 20


def test_held_out_data_of_which_nothing_was_hidden_tells_nothing():
    """As may be with a few tokens; a mean of none is no number."""
    run = SimpleNamespace(
        config=SimpleNamespace(eval_batches=0),
        runtime=model().runtime,
        trainer=SimpleNamespace(frozen=None, evaluate=lambda *_: (0.0, {"x": 0.0}, 0.0)),
    )
    held_out = SimpleNamespace(per_epoch=1, batch_at=lambda _: {})
    assert mean_losses(run, held_out, None, lambda: 0) == {}


def test_hidden_tokens_are_found():
    """Of a text of one word every hidden token is that word."""
    text = {"text": "a a a a a a"}
    run = Run("masked", model("bert", "ForMaskedLM"), text, steps=60, mlm_probability=0.5)
    assert run.rows[-1]["loss"] < 0.05
