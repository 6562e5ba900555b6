"""Transcription with tiny models: windows, languages, silence, and the command."""

from __future__ import annotations

import dataclasses
import json
import wave

import golden
import numpy as np
import pytest
from words import word_tokenizer

import flaxen
from flaxen.cli import main
from flaxen.cli.transcribe import clock
from flaxen.core.errors import ConfigError, InputError
from flaxen.speech import transcribe
from flaxen.speech.transcribe import Ear, Heard, Trust
from flaxen.speech.words import words_of

GENERATION = {
    "eos_token_id": 100,
    "decoder_start_token_id": 101,
    "no_timestamps_token_id": 110,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 102, "<|de|>": 103},
    "task_to_id": {"translate": 104, "transcribe": 105},
    "suppress_tokens": [101, 102, 103, 104, 105, 109],
}
"""Below 100 stand words, from 111 on times; a window is 60 frames."""


def folder(path, **more):
    golden.write_folder(golden.case("whisper"), path)
    told = {k: v for k, v in (GENERATION | more).items() if v is not None}
    (path / "generation_config.json").write_text(json.dumps(told))
    word_tokenizer(128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return flaxen.load(folder(tmp_path_factory.mktemp("whisper")))


def sound(seconds, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(int(16000 * seconds))).astype("f4")


ONCE = {"temperatures": (0.0,), "trust": Trust(logprob=-1e9, no_speech=1.1), "max_new_tokens": 8}


def test_a_short_piece(model):
    found = transcribe(model, sound(0.4), language="German", **ONCE)
    assert found.language == "de" and found.seconds == 0.4
    (one,) = found.segments
    assert (one.start, one.end) == (0.0, 0.4) and one.text == found.text
    assert all(t not in GENERATION["suppress_tokens"] for t in one.tokens)
    assert one.avg_logprob < 0 <= one.no_speech_prob <= 1
    heard = transcribe(model, sound(0.4), **ONCE)
    assert heard.language in ("en", "de")
    again = transcribe(model, sound(0.4), language=heard.language, **ONCE)
    assert again.text == heard.text


def test_windows_go_on_where_timestamps_say(model, monkeypatch):
    """0.6 s each; the first ends open after 0.2 s, the second says nothing, the third is closed."""
    said = iter([[111, 5, 121, 121, 6], [], [111, 7, 113, 113, 8, 116]])
    begun = []

    def hear(self, frames, prompt, timed):
        assert timed and prompt == [101, 102, 105] and frames.shape == (16, 60)
        begun.append(frames[0, 0])
        return Heard(next(said), -0.1, 0.0, 0.0)

    monkeypatch.setattr(Ear, "hear", hear)
    told = []
    found = transcribe(model, sound(1.3), language="en", progress=told.append)
    assert [(s.start, s.end, s.text) for s in found.segments] == [
        (0.0, 0.2, "b"),
        (0.8, 0.84, "d"),
        (0.84, 0.9, "assistant"),
    ]
    assert [s.tokens for s in found.segments] == [[111, 5, 121], [111, 7, 113], [113, 8, 116]]
    assert len(begun) == 3


def test_silence_is_left_out_and_doubts_are_heard_again(model, monkeypatch):
    temperatures = []

    def said(self, begun, temperature, seed, timed):
        temperatures.append(temperature)
        return ([5] * 40, -0.1) if temperature < 0.4 else ([5, 6, 7], -0.2)

    monkeypatch.setattr(Ear, "_said", said)
    found = transcribe(model, sound(0.4), language="en")
    # A text of one word over and over shrinks too well.
    assert temperatures == [0.0, 0.2, 0.4] and found.segments[0].temperature == 0.4
    monkeypatch.setattr(Ear, "_said", lambda *_: ([5], -2.0))
    silent = transcribe(model, sound(0.4), language="en", trust=Trust(no_speech=-1.0))
    assert silent.segments == [] and silent.text == ""


def test_what_cannot_be_is_refused(model, tmp_path):
    for settings, words in [
        ({"language": "klingon"}, "klingon"),
        ({"task": "sing"}, "transcribe, translate"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"rate": 0}, "rate is 0"),
    ]:
        with pytest.raises(InputError, match=words):
            transcribe(model, sound(0.4), **settings)
    for audio, words in [
        (np.zeros((2, 16000), "f4"), "one channel"),
        (np.zeros(16000, "i2"), "int16"),
        (np.full(16000, np.nan), "finite"),
        (sound(0.05), "0.1 s or more"),
    ]:
        with pytest.raises(InputError, match=words):
            transcribe(model, audio)
    english = dataclasses.replace(words_of(model, model_tokenizer(model)), languages={})
    with pytest.raises(InputError, match="English only"):
        english.checked("de", "transcribe")
    assert english.prompt(None, "transcribe", True) == [101]
    lacking = flaxen.load(folder(tmp_path / "x", no_timestamps_token_id=None))
    with pytest.raises(ConfigError, match="generation_config.json"):
        transcribe(lacking, sound(0.4))


def model_tokenizer(model):
    return flaxen.tokenizer(model.origin.folder)


def test_the_command(model, tmp_path, capsys):
    file = str(tmp_path / "x.wav")
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes((sound(0.4) * 32767).astype("<i2").tobytes())
    asked = ["transcribe", str(model.origin.folder), file, "--language", "en", "--max-tokens", "4"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["language"] == "en" and told["seconds"] == 0.4
    assert main([*asked[:3], file, *asked[3:], "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["file"], x["text"]) for x in lines] == [(file, told["text"])] * 2
    assert main([*asked[:3], file, *asked[3:]]) == 0
    assert capsys.readouterr().out.count(f"{file}:\n") == 2
    assert main([*asked[:2], str(tmp_path / "none.wav")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_clock():
    assert clock(3725.5) == "01:02:05.500"
