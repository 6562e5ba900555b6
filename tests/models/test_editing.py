"""Models after editing: what changed, what did not, and what is saved."""

from __future__ import annotations

import json

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.core.errors import ConfigError, InputError
from flaxen.layers.linear import Embedding, Linear
from flaxen.layers.norm import Identity
from flaxen.layers.runtime import PLAIN
from flaxen.models.decoder import Decoder
from flaxen.models.vocab import padded, resized

FAMILIES = ["llama", "gpt2", "gemma3_text"]
"""A head of its own; a tied one and no rope; a tied one and scaled embeddings."""
IDS = np.arange(1, 9, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("cases")
    return {name: golden.write_folder(golden.case(name), where / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def models(folders):
    return {name: flaxen.load(folder) for name, folder in folders.items()}


@pytest.fixture(params=FAMILIES)
def model(request, models):
    return models[request.param]


def logits(model, ids=IDS):
    return np.asarray(model(ids).logits)


def test_setting_what_was_got_changes_nothing(model):
    for part in ("input_embeddings", "output_embeddings", "decoder"):
        again = getattr(model, f"set_{part}")(getattr(model, f"get_{part}")())
        assert jax.tree.structure(again) == jax.tree.structure(model)
        jax.tree.map(np.testing.assert_array_equal, again, model)


def test_a_tied_head_follows_the_embeddings(model):
    table = model.get_input_embeddings()
    assert table.weight.shape == (128, 64)
    changed = model.set_input_embeddings(Embedding(weight=2 * table.weight))
    assert changed.get_input_embeddings().scale == table.scale
    head = changed.get_output_embeddings().weight
    tied = model.module.lm_head is None
    want = 2 * table.weight if tied else model.module.lm_head.weight
    np.testing.assert_array_equal(head, want)
    np.testing.assert_array_equal(model.get_input_embeddings().weight, table.weight)


def test_a_new_head_is_the_embeddings_where_both_are_one(model):
    new = model.set_output_embeddings(model.get_output_embeddings().weight * 2)
    same = new.get_input_embeddings().weight is new.get_output_embeddings().weight
    assert same == (model.module.lm_head is None)
    if not same:
        np.testing.assert_allclose(logits(new), 2 * logits(model), rtol=1e-4, atol=1e-5)


def test_a_decoder_goes_under_another_head(models):
    llama = models["llama"]
    other = llama.set_decoder(jax.tree.map(lambda x: x * 0.5, llama.get_decoder()))
    assert other.module.lm_head is llama.module.lm_head
    assert not np.allclose(logits(other), logits(llama))
    with pytest.raises(InputError, match="not built like"):
        llama.set_decoder(models["gpt2"].get_decoder())


def test_weights_of_another_shape_are_refused(model):
    with pytest.raises(InputError, match=r"weight has the shape \(9, 64\); expected \(128, 64\)"):
        model.set_input_embeddings(jnp.zeros((9, 64)))


def test_only_floats_and_decoders_of_its_kind_are_set(models):
    llama = models["llama"]
    with pytest.raises(InputError, match="weight is int32; expected floats"):
        llama.set_output_embeddings(jnp.zeros((128, 64), jnp.int32))
    for new in (None, llama):
        with pytest.raises(InputError, match=f"is a {type(new).__name__}; expected a Decoder"):
            llama.set_decoder(new)


@pytest.mark.parametrize("mesh", [None, "fsdp=2,tp=4"])
def test_rounded_embeddings_and_plain_ones_stand_in_for_each_other(models, folders, mesh):
    plain = flaxen.load(folders["llama"], mesh=mesh)
    rounded = plain.quantize({"embed_tokens": 8})
    set_ = rounded.set_input_embeddings(plain.get_input_embeddings())
    np.testing.assert_array_equal(logits(set_), logits(plain))
    back = plain.set_input_embeddings(rounded.get_input_embeddings())
    np.testing.assert_array_equal(logits(back), logits(rounded))


def test_new_tokens_follow_the_old_ones_and_the_folder_says_so(model, folders, tmp_path):
    """Their scores are about the mean of all scores, as their rows are about the mean row."""
    grown = model.resize_token_embeddings(130, pad_to_multiple_of=4)
    assert grown.config.vocab_size == 132
    old, new = logits(model), logits(grown)
    np.testing.assert_allclose(new[..., :128], old, atol=1e-5)
    if model.module.logit_softcap is None:
        mean = np.repeat(old.mean(-1, keepdims=True), 4, -1)
        np.testing.assert_allclose(new[..., 128:], mean, atol=1e-2)
    grown.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 132
    np.testing.assert_array_equal(logits(flaxen.load(tmp_path / "out")), new)
    before = load_file(folders[model.config.model_type] / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {k for k in before if before[k].tobytes() != after[k].tobytes()}
    assert {before[k].shape for k in changed} == {(128, 64)}
    assert len(changed) == (1 if model.module.lm_head is None else 2)
    for key in changed:
        np.testing.assert_array_equal(after[key][:128], before[key])


def test_new_rows_scatter_as_the_old_ones_do(models):
    weight = np.asarray(models["llama"].get_input_embeddings().weight, np.float64)
    rows = models["llama"].resize_token_embeddings(128 + 4000).get_input_embeddings().weight[128:]
    off = (np.asarray(rows, np.float64) - weight.mean(0)) / 1e-9**0.5
    want = np.cov(weight.T, bias=True)
    np.testing.assert_allclose(np.cov(off.T, bias=True), want, atol=0.15 * want.max())


def test_new_rows_depend_on_the_seed_and_on_nothing_else(models):
    rows = lambda seed: models["llama"].resize_token_embeddings(131, seed=seed).parameters()
    one, same, other = rows(0), rows(0), rows(1)
    for path in ("embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(one[path], same[path])
        assert (np.asarray(one[path])[128:] != np.asarray(other[path])[128:]).any()


def test_new_rows_may_be_drawn_around_zero(models):
    rows = models["llama"].resize_token_embeddings(1128, mean_resizing=False)
    new = np.asarray(rows.get_input_embeddings().weight)[128:]
    assert abs(new.mean()) < 1e-3
    assert abs(new.std() - models["llama"].config.initializer_range) < 1e-3


def test_the_last_tokens_can_be_cut_off(model):
    short = model.resize_token_embeddings(100)
    assert short.config.vocab_size == 100
    np.testing.assert_allclose(logits(short), logits(model)[..., :100], atol=1e-5)
    with pytest.raises(InputError, match="0 to 99"):
        short(IDS + 92)


def test_sizes_that_are_none_are_refused(models):
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(InputError, match="expected a whole number"):
            models["llama"].resize_token_embeddings(wrong)
    assert models["llama"].resize_token_embeddings().config.vocab_size == 128


def test_an_abstract_model_is_not_resized(folders):
    with pytest.raises(ConfigError, match="without abstract"):
        flaxen.load(folders["llama"], abstract=True).resize_token_embeddings(130)


@pytest.mark.exhaustive
def test_padding_rows_never_win_and_are_in_no_loss(model):
    wide = model.pad_vocab(50)
    assert wide.get_input_embeddings().weight.shape == (150, 64)
    out, plain = wide(IDS, labels=IDS), model(IDS, labels=IDS)
    np.testing.assert_allclose(out.logits[..., :128], plain.logits, atol=1e-5)
    assert np.isneginf(out.logits[..., 128:]).all()
    np.testing.assert_allclose(out.loss, plain.loss, rtol=1e-6)
    np.testing.assert_allclose(wide.loss(IDS, IDS), plain.loss, rtol=1e-6)
    with pytest.raises(InputError, match="0 to 127"):
        wide(np.array([[140]]))


def test_padding_rows_learn_nothing(models):
    grads = jax.grad(lambda m: m.loss(IDS, IDS))(models["llama"].pad_vocab(50)).parameters()
    for path in ("embed_tokens.weight", "lm_head.weight"):
        assert np.isfinite(grads[path]).all()
        assert not np.asarray(grads[path])[128:].any()


def test_padding_is_never_generated(models):
    ask = {"max_new_tokens": 6, "do_sample": True, "temperature": 50.0, "seed": 0}
    new = models["gpt2"].pad_vocab(1000).generate(np.repeat(IDS, 8, 0), **ask)
    assert new.max() < 128


def test_padding_is_not_saved(model, tmp_path):
    model.save(tmp_path / "plain")
    model.pad_vocab(50).save(tmp_path / "padded")
    for name in ("model.safetensors", "config.json"):
        one, two = ((tmp_path / kind / name).read_bytes() for kind in ("plain", "padded"))
        assert one == two


def test_padding_comes_off_again(model):
    back = model.pad_vocab(50).pad_vocab(1)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, back, model)


def test_on_a_mesh_rows_are_cut_as_the_plan_says(models, folders):
    mesh = flaxen.load(folders["llama"], mesh="fsdp=2,tp=4")
    odd = mesh.resize_token_embeddings(130)
    assert odd.get_input_embeddings().weight.sharding.spec == P(None, "fsdp")
    fits = odd.pad_vocab()
    assert fits.get_input_embeddings().weight.shape == (132, 64)
    assert fits.get_input_embeddings().weight.sharding.spec == P("tp", "fsdp")
    assert fits.get_output_embeddings().weight.sharding.spec == P("tp", "fsdp")
    want = logits(models["llama"].resize_token_embeddings(130))
    np.testing.assert_allclose(logits(fits)[..., :130], want, atol=1e-5)
    new = fits.set_input_embeddings(np.zeros((132, 64), np.float32))
    assert new.get_input_embeddings().weight.sharding.spec == P("tp", "fsdp")


def test_the_bias_of_a_head_follows():
    table, bias = jnp.ones((6, 4)), jnp.arange(6.0)
    decoder = Decoder(
        embed_tokens=Embedding(weight=table),
        layers=[],
        norm=Identity(),
        lm_head=Linear(weight=table, bias=bias),
    )
    more = resized(decoder, 8, None, std=None, seed=0).lm_head.bias
    np.testing.assert_allclose(more, [*bias, 2.5, 2.5], atol=1e-3)
    flat = resized(decoder, 8, None, std=0.02, seed=0).lm_head.bias
    np.testing.assert_array_equal(flat, [*bias, 0, 0])
    wide = padded(decoder, 8, None)
    assert wide.lm_head.bias.shape == (8,)
    assert np.isneginf(wide.logits(jnp.ones((1, 4)), PLAIN)[:, 6:]).all()


def test_the_bias_of_a_tied_head_stays_with_it(tmp_path):
    case = golden.case("phi")
    folder = golden.write_folder(case, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    untied = {k: v for k, v in case.weights.items() if k != "lm_head.weight"}
    save_file(untied, folder / "model.safetensors", metadata={"format": "pt"})
    model = flaxen.load(folder)
    bias = case.weights["lm_head.bias"]
    np.testing.assert_array_equal(model.get_output_embeddings().bias, bias)
    doubled = model.set_input_embeddings(2 * model.get_input_embeddings().weight)
    np.testing.assert_array_equal(doubled.get_output_embeddings().bias, bias)
    more = model.resize_token_embeddings(130)
    np.testing.assert_allclose(more.get_output_embeddings().bias[:128], bias)
    assert more.get_output_embeddings().bias.shape == (130,)
