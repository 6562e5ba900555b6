"""Servers that answer with something else than a hub does: each is one of our errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub, commit
from safetensors.numpy import save_file

from flaxen.convert.formats import ranges
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.core.errors import CheckpointError


def listing(*names):
    files = [{"rfilename": name, "size": 8, "blobId": "a" * 40} for name in names]
    return json.dumps({"id": "org/x", "sha": commit("main"), "siblings": files}).encode()


JUNK = {
    "a page": b"<html>log in</html>",
    "cut short": b'{"id": "org/x"',
    "a list": b"[]",
    "numbers for files": b'{"id": "org/x", "sha": "b", "siblings": [5]}',
    "a number for a name": b'{"id": "org/x", "sha": "b", "siblings": [{"rfilename": 5}]}',
}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("case", JUNK)
def test_what_is_no_list_of_files_is_refused(hub, llama, case, remote):
    hub.add("org/x", llama)
    hub.listed = JUNK[case]
    with pytest.raises(CheckpointError, match="something else than the files of org/x"):
        open_checkpoint("org/x", remote=remote)


@pytest.mark.parametrize("name", ["../../x.gguf", "/tmp/x.gguf", "..\\x.gguf", "a/../x.gguf"])
def test_a_file_outside_its_repository_is_none_of_it(hub, llama, name):
    hub.add("org/x", llama)
    hub.listed = listing(name)
    with pytest.raises(CheckpointError, match="It holds nothing"):
        open_checkpoint("org/x")


def test_a_file_that_is_listed_and_not_there_is_named(hub, llama):
    hub.add("org/x", llama)
    hub.listed = listing("model-x.gguf")
    with pytest.raises(CheckpointError, match="does not give: model-x"):
        open_checkpoint("org/x")


@pytest.mark.parametrize("token", [f"{Hub.TOKEN}\n", f" {Hub.TOKEN}"])
@pytest.mark.parametrize("remote", [False, True])
def test_space_around_a_token_is_left_out(hub, llama, token, remote, same_weights):
    hub.add("org/x", llama, private=True)
    assert same_weights(open_checkpoint("org/x", token=token, remote=remote))


@pytest.mark.parametrize("name", ["org/x", "http://127.0.0.1:1/model.safetensors"])
def test_a_token_that_cannot_be_sent_is_not_told(hub, llama, name):
    hub.add("org/x", llama)
    with pytest.raises(CheckpointError, match="no token has") as caught:
        open_checkpoint(name, token="hf_secret\nx", remote=True)
    assert "secret" not in str(caught.value)


def test_other_bytes_of_the_same_size_are_no_longer_the_file(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "WAIT", 0.0)
    folders: list[Path] = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(folders):
        folder.mkdir()
        save_file({"a": np.full((4, 8192), i, np.float32)}, folder / "model.safetensors")
    hub.add("org/x", shutil.copytree(folders[0], tmp_path / "served"))
    tensor = open_checkpoint("org/x", remote=True)["a"]
    assert tensor.read((slice(0, 1), slice(0, 8192))).max() == 0
    shutil.copy(folders[1] / "model.safetensors", tmp_path / "served")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.read()
