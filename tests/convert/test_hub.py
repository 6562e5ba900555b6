"""Hub repositories on a small hub: what is fetched, what is kept, what is refused."""

from __future__ import annotations

import collections
import errno
import json
import shutil
import time
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pytest
from hub_server import Hub, commit, without_network
from safetensors.numpy import save_file

import flaxen
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.hub import hub_name
from flaxen.core.errors import CheckpointError


def refused(name: str, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name, **kwargs)
    return str(caught.value)


def offline(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_hub_id_loads_as_its_folder_does(hub, llama):
    hub.add("org/tiny-1.5", llama)
    here, there = flaxen.load(llama), flaxen.load("org/tiny-1.5")
    assert jax.tree.all(jax.tree.map(np.array_equal, here, there))


def test_a_second_load_downloads_nothing(hub, llama_shards, same_weights):
    hub.add("org/tiny", llama_shards)
    assert same_weights(open_checkpoint("org/tiny"))
    hub.log.clear()
    assert same_weights(open_checkpoint("org/tiny"))
    assert [r.path for r in hub.log] == ["/api/models/org/tiny"]


def test_one_format_is_fetched_and_what_stands_beside_it(hub, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "crowded")
    wanted = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"]
    wanted += ["chat_template.jinja", "merges.txt", "additional_chat_templates/tools.jinja"]
    other = ["model.fp16.safetensors", "consolidated.safetensors", "consolidated.00.pth"]
    other += ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json"]
    other += ["tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "onnx/config.json", "q.gguf"]
    other += ["README.md", "modeling_custom.py", "original/params.json", ".gitattributes"]
    for name in [*wanted[1:], *other]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    hub.add("org/crowded", folder)
    open_checkpoint("org/crowded")
    assert sorted(hub.files()) == sorted([*wanted, "model.safetensors"])


def test_shards_are_those_that_the_index_names(hub, llama_shards, tmp_path, same_weights):
    folder = shutil.copytree(llama_shards, tmp_path / "old")
    (folder / "model-00001-of-00099.safetensors").write_text("of another time")
    hub.add("org/old", folder)
    assert same_weights(open_checkpoint("org/old"))
    assert "model-00001-of-00099.safetensors" not in hub.files()
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "does not have: model-00002-of-00003" in refused("org/old")


def test_pickled_weights_are_fetched_where_there_are_no_others(hub, tmp_path):
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in ("pytorch_model-00001-of-00001.bin", "config.json", "q.gguf"):
        (tmp_path / name).write_text(name)
    hub.add("org/pickled", tmp_path)
    refused("org/pickled")
    assert sorted(hub.files()) == [
        "config.json",
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
    ]


def test_of_several_gguf_files_one_is_named(hub, tmp_path):
    for name in ("q4.gguf", "q8.gguf"):
        gguf_files.write(tmp_path / name, "llama")
    hub.add("org/quants", tmp_path)
    assert "as in org/name/q4.gguf: q4.gguf, q8.gguf" in refused("org/quants")
    assert "'q2.gguf'" in refused("org/quants/q2.gguf")
    assert hub.files() == []
    assert "model.embed_tokens.weight" in open_checkpoint("org/quants/q8.gguf")
    assert hub.files() == ["q8.gguf"]


def test_a_lone_gguf_file_needs_no_name(hub, tmp_path):
    gguf_files.write(tmp_path / "a.gguf", "llama")
    hub.add("org/one", tmp_path)
    assert open_checkpoint("org/one").config["model_type"] == "llama"


def test_a_folder_of_a_repository(hub, llama, tmp_path, same_weights):
    shutil.copytree(llama, tmp_path / "served/sub/encoder")
    hub.add("org/nested", tmp_path / "served")
    assert "Add a folder to the name: org/name/sub/encoder" in refused("org/nested")
    checkpoint = open_checkpoint("org/nested/sub/encoder")
    assert same_weights(checkpoint) and checkpoint.config["model_type"] == "llama"


def test_branches_tags_and_commits(hub, tmp_path):
    for name, value in {"main": 0, "v1": 1, "fix": 2}.items():
        (tmp_path / name).mkdir()
        save_file({"a": np.array([value])}, tmp_path / name / "model.safetensors")
    hub.add("org/many", tmp_path / "main").revisions |= {
        name: tmp_path / name for name in ("v1", "fix")
    }

    def value(revision: str | None) -> int:
        return int(open_checkpoint("org/many", revision=revision)["a"].read()[0])

    assert [value(r) for r in (None, "v1", "fix", commit("v1"))] == [0, 1, 2, 1]
    assert "has no revision 'v9'" in refused("org/many", revision="v9")


def test_a_commit_in_the_cache_needs_no_request(hub, llama, same_weights):
    hub.add("org/tiny", llama)
    open_checkpoint("org/tiny")
    hub.log.clear()
    assert same_weights(open_checkpoint("org/tiny", revision=commit("main")))
    assert hub.log == []


def test_without_a_network_the_cache_serves(hub, llama_shards, monkeypatch, same_weights):
    hub.add("org/tiny", llama_shards)
    open_checkpoint("org/tiny")
    without_network(monkeypatch)
    assert same_weights(open_checkpoint("org/tiny"))


def test_a_hub_out_of_order_leaves_the_cache(hub, llama, monkeypatch, same_weights):
    hub.add("org/tiny", llama)
    open_checkpoint("org/tiny")
    hub.busy["/api/models/org/tiny"] = 1
    assert same_weights(open_checkpoint("org/tiny"))
    hub.busy["/api/models/org/new"] = 1
    assert "answered 503" in refused("org/new")


def test_offline_the_cache_serves_and_nothing_is_asked(hub, llama, monkeypatch, same_weights):
    hub.add("org/tiny", llama)
    open_checkpoint("org/tiny")
    hub.log.clear()
    offline(monkeypatch)
    assert same_weights(open_checkpoint("org/tiny"))
    assert "HF_HUB_OFFLINE is set" in refused("org/tiny", revision="v2")
    assert hub.log == []


@pytest.mark.parametrize("cut_off", [offline, without_network])
def test_what_is_neither_cached_nor_in_reach_fails_at_once(hub, monkeypatch, cut_off):
    cut_off(monkeypatch)
    start = time.perf_counter()
    assert "not complete in the hub's cache" in refused("org/absent")
    assert time.perf_counter() - start < 1


def test_a_half_loaded_repository_is_not_taken_for_a_whole_one(hub, llama_shards, monkeypatch):
    hub.add("org/tiny", llama_shards)
    folder = open_checkpoint("org/tiny").folder
    (folder / "model-00002-of-00003.safetensors").unlink()
    offline(monkeypatch)
    assert "not complete" in refused("org/tiny")


def test_a_download_goes_on_where_the_connection_broke(hub, llama, monkeypatch, same_weights):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 10)
    hub.add("org/tiny", llama)
    hub.drop["model.safetensors"] = 2
    assert same_weights(open_checkpoint("org/tiny"))
    size = (llama / "model.safetensors").stat().st_size
    assert hub.bytes_of("model.safetensors") < size + 3 * 1024
    assert hub.files().count("model.safetensors") == 3


def test_a_download_that_fails_keeps_the_files_that_arrived(hub, llama_shards, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.add("org/tiny", llama_shards)
    second = "model-00002-of-00003.safetensors"
    hub.drop[second] = 1000
    assert "files that arrived are kept" in refused("org/tiny")
    hub.drop.clear()
    hub.log.clear()
    open_checkpoint("org/tiny")
    assert second in hub.files() and "model.safetensors.index.json" not in hub.files()


def test_a_private_repository_opens_with_the_token_alone(hub, llama, monkeypatch, same_weights):
    hub.add("org/mine", llama, private=True)
    for name in ("org/mine", "org/absent"):
        why = refused(name)
        assert f"'{name}'" in why and "no such repository, or it is private" in why
        assert "hf auth login" in why
    assert "no such repository" in refused("org/mine", token="hf_wrong")
    assert same_weights(open_checkpoint("org/mine", token=Hub.TOKEN))
    shutil.rmtree(open_checkpoint("org/mine", token=Hub.TOKEN).folder)
    monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
    assert same_weights(open_checkpoint("org/mine"))


@pytest.mark.parametrize("remote", [False, True])
def test_a_gated_repository_says_where_its_terms_are(hub, llama, remote):
    hub.add("org/gated", llama, gated=True)
    why = refused("org/gated", remote=remote)
    assert "org/gated is gated" in why and "/org/gated, then log in" in why
    assert len(open_checkpoint("org/gated", token=Hub.TOKEN, remote=remote)) == 21


def test_a_repository_without_weights_says_what_it_holds(hub, tmp_path):
    for name in ("README.md", "model.onnx", "data.csv"):
        (tmp_path / name).touch()
    hub.add("org/other", tmp_path)
    why = refused("org/other")
    assert "org/other on the hub" in why and "It holds model.onnx, README.md, data.csv" in why


def test_what_does_not_fit_the_disk_is_not_begun(hub, llama, monkeypatch, same_weights):
    hub.add("org/big", llama)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 100))
    assert "0.0 GB are free. Make room, or set HF_HOME" in refused("org/big")
    assert hub.files() == []


def test_a_disk_that_becomes_full_is_named(hub, llama, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add("org/big", llama)
    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert "The disk became full while org/big was downloaded" in refused("org/big")


def test_nothing_is_printed_where_nobody_looks(hub, llama, capfd):
    hub.add("org/tiny", llama)
    open_checkpoint("org/tiny")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name",
    ["/nowhere/at/all", "./org/name", "~/org", "gpt2", "", "folder/model.gguf", "a b/c", "org//x"],
)
def test_what_is_neither_path_nor_hub_id_is_refused(name):
    with pytest.raises(CheckpointError, match="no hub id"):
        hub_name(name)


def test_a_web_address_is_read_in_place_only():
    assert "pass remote=True" in refused("https://example.invalid/model.safetensors")


def test_a_local_folder_wins_over_a_hub_id(hub, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, Path("org/tiny"))
    assert len(open_checkpoint("org/tiny")) == 21
    assert hub.log == []
