"""Tokenizers by hub id: the tokenizer's files come, the weights do not."""

from __future__ import annotations

import json
import shutil

import pytest
from hub_server import Hub, commit, without_network

from flaxen.core.errors import CheckpointError
from flaxen.text import encode, tokenizer


@pytest.fixture
def folder(tok, tmp_path):
    tok.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "saved/model.safetensors").write_bytes(b"weights")
    return tmp_path / "saved"


def test_the_tokenizer_comes_without_the_weights(hub, folder, tok, monkeypatch):
    hub.add("org/words-1.5", folder, private=True)
    found = tokenizer("org/words-1.5", token=Hub.TOKEN)
    assert encode(found, "hello") == encode(tok, "hello")
    assert "tokenizer.json" in hub.files() and "model.safetensors" not in hub.files()
    without_network(monkeypatch)
    assert encode(tokenizer("org/words-1.5"), "hello") == encode(tok, "hello")


def test_of_a_revision(hub, folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    hub.add("org/words", empty).revisions["v1"] = folder
    with pytest.raises(CheckpointError, match="org/words on the hub: It has neither"):
        tokenizer("org/words")
    tokenizer("org/words", revision=commit("v1"))


def test_of_a_repository_of_one_gguf_file(hub, byte_file, tmp_path, tok):
    (tmp_path / "one").mkdir()
    shutil.copy(byte_file, tmp_path / "one")
    hub.add("org/one", tmp_path / "one")
    for name in ("org/one", "org/one/byte.gguf"):
        assert encode(tokenizer(name), "hello") == encode(tok, "hello")


def test_a_path_that_is_not_there_is_no_hub_id():
    with pytest.raises(CheckpointError, match="no file or folder here, and no hub id"):
        tokenizer("models/absent.gguf")
