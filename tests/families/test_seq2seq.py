"""Encoder-decoders against Transformers on torch: numbers, gradients, answers, bytes, meshes."""

from __future__ import annotations

import json

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from words import word_tokenizer

import flaxen
from flaxen.cli import main
from flaxen.core.errors import ConfigError, InputError
from flaxen.layers.positions import waves
from flaxen.models.shift import LanguageShift, SelfShift, Shift
from flaxen.pretrained import from_config

CASES = ["t5", "bart", "whisper"]
RELATIVES = [name for name in golden.cases("seq2seq") if name not in CASES]
UNLIKE = ["marian", "t5_gated"]
"""The other relatives are much like these."""
MESH = "fsdp=4,tp=2"
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, absolute, relative."""


def close(got, want, mask=None, atol=LOGITS):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < atol


def source(x):
    return {k: x[k] for k in ("input_ids", "attention_mask", "input_features") if k in x}


def comes_back(case, model, folder):
    """Byte for byte."""
    model.save(folder)
    back = load_file(folder / "model.safetensors")
    assert back.keys() == case.weights.keys()
    for name, want in case.weights.items():
        assert (back[name].dtype, back[name].shape) == (want.dtype, want.shape)
        assert back[name].tobytes() == want.tobytes()


@pytest.fixture(
    scope="module", params=[*[(n, None) for n in CASES], ("bart", "scan"), ("t5", MESH)], ids=str
)
def loaded(request, tmp_path_factory):
    name, how = request.param
    folder = golden.write_folder(golden.case(name), tmp_path_factory.mktemp(name))
    mesh = how if how == MESH else None
    return golden.case(name), flaxen.load(folder, mesh=mesh, scan_layers=how == "scan")


def test_numbers_gradients_and_bytes(loaded, tmp_path):
    case, model = loaded
    x, mask = case.arrays, case.arrays.get("attention_mask")

    @jax.jit
    def run(model):
        def loss(model):
            return model(**source(x), labels=x["labels"]).loss

        out = model(**source(x), decoder_input_ids=x["decoder_input_ids"])
        return *jax.value_and_grad(loss)(model), out

    loss, grads, out = run(model)
    close(out.logits, x["logits"])
    close(out.encoder_last_hidden_state, x["encoder_last_hidden_state"], mask)
    assert abs(loss - x["loss"]) < LOSS
    if "long_logits" in x:
        long = model(x["long_input_ids"], decoder_input_ids=x["long_decoder_input_ids"])
        close(long.logits, x["long_logits"])
    comes_back(case, model, tmp_path / "back")
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for name, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[name]) == pytest.approx(norm, rel=GRADIENTS), name


def test_greedy_answers(loaded):
    case, model = loaded
    x = case.arrays
    got = model.generate(**source(x), max_new_tokens=16, eos_token_id=[])
    np.testing.assert_array_equal(got, x["gen_sequences"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache", ["int8", "paged"])
def test_answers_from_other_caches(cache, tmp_path):
    case = golden.case("t5")
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path), cache=cache)
    got = model.generate(**source(x), max_new_tokens=16, eos_token_id=[])
    same = (got == x["gen_sequences"]).all(1)
    assert same.all() if cache == "paged" else got.shape == x["gen_sequences"].shape


@pytest.mark.parametrize("name", CASES)
def test_a_sparse_config_means_the_same_and_all_it_looks_at_can_be_seen(name, tmp_path):
    case = golden.case(name)
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path, sparse=True))
    ids = x["decoder_input_ids"]
    asked = {"output_attentions": True, "output_hidden_states": True}
    out = model(**source(x), decoder_input_ids=ids, **asked)
    close(out.logits, x["logits"])
    S, T = out.encoder_last_hidden_state.shape[1], ids.shape[1]
    assert [a.shape[1:] for a in out.cross_attentions] == [(4, T, S)] * 2
    assert [a.shape[1:] for a in out.encoder_attentions] == [(4, S, S)] * 2
    assert [a.shape[1:] for a in out.decoder_attentions] == [(4, T, T)] * 2
    np.testing.assert_allclose(out.cross_attentions[1].sum(-1), 1, atol=1e-5)
    assert len(out.encoder_hidden_states) == len(out.decoder_hidden_states) == 3
    close(out.encoder_hidden_states[-1], out.encoder_last_hidden_state, atol=1e-6)
    if "attention_mask" in x:
        hidden = np.broadcast_to(
            x["attention_mask"][:, None, None] == 0, out.cross_attentions[0].shape
        )
        assert np.asarray(out.cross_attentions[0])[hidden].max() == 0
    alone = model.loss(**source(x), labels=x["labels"])
    assert abs(alone - x["loss"]) < LOSS


def fresh(name="t5", **more):
    return from_config(golden.case(name).config | more)


def test_rules_of_a_checkpoint_and_of_a_call():
    """The first token, the last, and what never comes."""
    model, x = fresh("bart", forced_eos_token_id=2), golden.case("bart").arrays
    got = model.generate(**source(x), max_new_tokens=5, eos_token_id=[], forced_bos_token_id=7)
    assert (got[:, 1] == 7).all() and (got[:, -1] == 2).all()
    common = int(np.bincount(got[:, 2:-1].ravel()).argmax())
    less = model.generate(
        **source(x), max_new_tokens=5, suppress_tokens=[common], begin_suppress_tokens=[9]
    )
    assert common not in less[:, 1:] and 9 not in less[:, 1]
    prompt = [2, 5, 6]
    more = model.generate(**source(x), decoder_input_ids=prompt, max_new_tokens=2)
    assert more.shape == (3, 5) and (more[:, :3] == prompt).all()
    with pytest.raises(InputError, match="suppress_tokens is"):
        model.generate(**source(x), suppress_tokens=[128])


@pytest.mark.exhaustive
def test_answers_end_and_are_drawn():
    model, x = fresh(), golden.case("t5").arrays
    ids, logp = model.generate(
        **source(x), max_new_tokens=6, do_sample=True, seed=3, return_logprobs=True
    )
    again = model.generate(**source(x), max_new_tokens=6, do_sample=True, seed=3)
    np.testing.assert_array_equal(ids, again)
    assert logp.shape == (3, ids.shape[1] - 1) and (logp <= 0).all()
    one = model.generate(x["input_ids"][:1], max_new_tokens=6, eos_token_id=[])
    ended = model.generate(x["input_ids"][:1], max_new_tokens=6, eos_token_id=int(one[0, 2]))
    assert ended.shape[1] == 1 + int(np.argmax(one[0, 1:] == one[0, 2])) + 1


def test_what_does_not_fit_is_refused():
    t5, whisper = fresh(), fresh("whisper")
    ids, heard = np.ones((2, 4), np.int32), golden.case("whisper").arrays["input_features"]
    assert t5.can_generate() and fresh("t5", architectures=["T5Model"]).can_generate() is False
    for call, words in [
        (lambda: t5(ids), "decoder is given nothing"),
        (lambda: t5(ids, decoder_input_ids=ids[:1]), "2 rows are read and 1 said"),
        (lambda: t5(ids, decoder_input_ids=ids, position_ids=ids), "does not take position_ids"),
        (lambda: t5.init_cache(1, 4), "cannot remember"),
        (lambda: t5.generate(input_features=heard), "reads input_ids"),
        (lambda: whisper(heard[..., :-1], decoder_input_ids=ids), "does not take input_ids|take"),
        (lambda: whisper(input_features=heard[..., :-1], decoder_input_ids=ids), "2, 16, 59"),
        (lambda: whisper.generate(input_features=heard, max_new_tokens=41), "positions for 40"),
        (lambda: t5.transcribe("x.wav"), "expected Whisper"),
    ]:
        with pytest.raises(InputError, match=words):
            call()


def test_a_model_without_a_head_gives_states():
    model, x = fresh("bart", architectures=["BartModel"]), golden.case("bart").arrays
    out = model(x["input_ids"])
    assert out.last_hidden_state.shape == (3, 12, 64) == out.encoder_last_hidden_state.shape
    states = model.module.features(x["input_ids"], np.ones((3, 12)), model.runtime)
    close(states, out.encoder_last_hidden_state)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in UNLIKE else [pytest.mark.exhaustive])
        for name in RELATIVES
    ],
)
def test_relatives(name, tmp_path):
    """t5_gated has a head of its own, of which its config knows nothing."""
    case = golden.case(name)
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path, sparse=True))

    @jax.jit
    def run(model):
        out = model(**source(x), decoder_input_ids=x["decoder_input_ids"])
        long = model(x["long_input_ids"], decoder_input_ids=x["long_decoder_input_ids"])
        return out, long.logits, model(**source(x), labels=x["labels"]).loss

    out, long, loss = run(model)
    close(out.logits, x["logits"])
    close(out.encoder_last_hidden_state, x["encoder_last_hidden_state"], x["attention_mask"])
    close(long, x["long_logits"])
    assert abs(loss - x["loss"]) < LOSS
    got = model.generate(**source(x), max_new_tokens=16, eos_token_id=[])
    np.testing.assert_array_equal(got, x["gen_sequences"])
    comes_back(case, model, tmp_path / "back")


def test_what_a_file_may_lack_or_hold_besides(tmp_path):
    """A bias that is zero; positions that nobody learned."""
    case = golden.case("marian")
    other = {k: v for k, v in case.weights.items() if k != "final_logits_bias"}
    other["model.encoder.embed_positions.weight"] = np.zeros((40, 32), np.float32)
    file = golden.Case("other", case.about, case.arrays, other)
    model = flaxen.load(golden.write_folder(file, tmp_path))
    assert not np.asarray(model.module.logits_bias).any()
    x = case.arrays
    got = model(**source(x), decoder_input_ids=x["decoder_input_ids"]).logits
    close(got, x["logits"] - case.weights["final_logits_bias"])
    model.save(tmp_path / "back")
    assert "final_logits_bias" not in load_file(tmp_path / "back" / "model.safetensors")


def test_waves():
    table = waves(40, 33)
    assert np.array_equal(table[0], [0] * 17 + [1] * 16)
    want = [np.sin(3 / 10000 ** (2 / 33)), np.cos(3 / 10000 ** (2 / 33))]
    np.testing.assert_allclose([table[3, 1], table[3, 18]], want, rtol=1e-6)


def test_the_command_answers(tmp_path, capsys):
    folder = golden.write_folder(golden.case("t5"), tmp_path)
    word_tokenizer(128).save_pretrained(folder)
    asked = ["generate", str(folder), "a b c", "--raw", "--max-tokens", "4"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tokens"]) <= 5 and isinstance(told["text"], str)
    assert main([*asked, "--stop", "x"]) == 2


def test_labels_move_by_the_rule_of_each_model():
    labels = np.array([[7, -100, 8, 2, -100]])
    np.testing.assert_array_equal(Shift(5, 0)(labels), [[5, 7, 0, 8, 2]])
    np.testing.assert_array_equal(LanguageShift(None, 1)(labels[:, 2:]), [[2, 8, 2]])
    assert Shift(5, 0).alone(labels) is None
    np.testing.assert_array_equal(SelfShift(5, 0).alone(labels[:, 2:4]), [[5, 8]])
    for rule in (Shift(None, 0), Shift(5, None), LanguageShift(5, None)):
        with pytest.raises(ConfigError, match="pad_token_id"):
            rule(labels)
