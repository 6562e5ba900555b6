"""How an encoder is called: what it takes, what it refuses, what comes back."""

from __future__ import annotations

import encoder_cases
import jax
import numpy as np
import pytest

import flaxen
from flaxen import InputError
from flaxen.pretrained import from_config

IDS = np.array([[5, 6, 7, 8]], np.int32)


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(name):
        if name not in made:
            made[name] = from_config(encoder_cases.case(name).config)
        return made[name]

    return model


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("bert/bare", {}, "input_ids is missing"),
        (
            "bert/bare",
            {"input_ids": IDS, "past_key_values": 1},
            "without a head, which does not take",
        ),
        ("bert/bare", {"input_ids": IDS, "labels": IDS}, "does not take labels"),
        ("bert/bare", {"input_ids": IDS[0]}, "batch, length"),
        ("bert/bare", {"input_ids": IDS + 100}, "vocabulary"),
        ("bert/bare", {"input_ids": IDS[:, :0]}, r"not int32 of shape \(1, 0\)"),
        ("bert/bare", {"input_ids": IDS, "position_ids": IDS + 999}, "between 1004 and 1007; this"),
        ("bert/bare", {"input_ids": IDS, "position_ids": -IDS}, "has positions 0 to"),
        ("bert/bare", {"input_ids": np.repeat(IDS, 11, 1)}, "positions for 40"),
        ("bert/bare", {"input_ids": IDS, "token_type_ids": IDS}, "token_type_ids hold 8"),
        ("bert/bare", {"input_ids": IDS, "attention_mask": IDS[:, :2]}, "attention_mask has shape"),
        ("distilbert/bare", {"input_ids": IDS, "token_type_ids": IDS}, "does not take token_type"),
        ("roberta/bare", {"input_ids": np.repeat(IDS, 10, 1)}, "positions for 38"),
        ("bert/single", {"input_ids": IDS, "labels": np.array([5])}, "labels hold 5"),
        ("bert/single", {"input_ids": IDS, "labels": np.array([1, 2])}, "labels are"),
        ("bert/multi", {"input_ids": IDS, "labels": np.zeros((1, 2))}, "labels have shape"),
        ("bert/tokens", {"input_ids": IDS, "labels": IDS}, "labels hold"),
        ("bert/choices", {"input_ids": IDS}, "batch, choices, length"),
        ("bert/span", {"input_ids": IDS, "labels": IDS}, "takes .*start_positions"),
    ],
)
def test_what_does_not_fit_is_refused(models, name, given, says):
    with pytest.raises(InputError, match=says):
        models(name)(**given)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.generate(IDS),
        lambda m: flaxen.generate.generate(m, IDS),
        lambda m: flaxen.generate.stream(m, IDS),
        lambda m: m.init_cache(1, 8),
        lambda m: m.get_output_embeddings(),
        lambda m: m.resize_token_embeddings(50),
    ],
)
def test_what_only_text_models_do_names_the_kind_of_model(models, call):
    with pytest.raises(InputError, match="an encoder for masked language modeling, which cannot"):
        call(models("mpnet/masked"))
    assert not models("mpnet/masked").can_generate()


def test_hidden_states_attentions_and_tuples(models):
    model = models("bert/single")
    out = model(IDS, output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in out.hidden_states] == [(1, 4, 32)] * 2
    assert [x.shape for x in out.attentions] == [(1, 4, 4, 4)]
    np.testing.assert_allclose(out.attentions[0].sum(-1), 1, atol=1e-6)
    assert out.attentions[0][0, 0, 0, 3] > 0, "the first token sees the last"
    loss, logits = model(IDS, labels=np.array([2]), return_dict=False)
    assert (loss.shape, logits.shape) == ((), (1, 5))
    np.testing.assert_allclose(model.loss(IDS, np.array([2])), loss, rtol=1e-6)


def test_padding_changes_nothing(models):
    for name in ("bert/bare", "mpnet/bare", "modernbert/bare", "roberta/bare"):
        model = models(name)
        pad = model.module.pad
        ids = np.concatenate([IDS, np.full((1, 3), pad)], 1).astype(np.int32)
        mask = np.array([[1] * 4 + [0] * 3])
        alone, padded = model(IDS).last_hidden_state, model(ids, mask).last_hidden_state
        np.testing.assert_allclose(padded[:, :4], alone, atol=2e-6, err_msg=name)


def test_labels_that_do_not_count_give_no_loss(models):
    model = models("bert/tokens")
    out = jax.value_and_grad(lambda m: m(IDS, labels=np.full_like(IDS, -100)).loss)(model)
    assert float(out[0]) == 0
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(out[1]))


def test_dropout_needs_a_key_and_follows_it(models):
    model = models("modernbert/bare")
    assert not any(getattr(x, "dropout", 0) for x in [model.module])
    model = models("bert/single")
    with pytest.raises(InputError, match="dropout_rng"):
        model(IDS, train=True)
    run = lambda seed: model(IDS, train=True, dropout_rng=jax.random.key(seed)).logits
    assert np.array_equal(run(0), run(0)) and not np.allclose(run(0), run(1))
