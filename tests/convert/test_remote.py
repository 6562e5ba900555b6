"""Checkpoints read where they are: which bytes are asked for, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from hub_server import Hub
from safetensors.numpy import save_file

import flaxen
from flaxen.convert.formats import ranges, remote
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.remote import FIRST, widened
from flaxen.convert.place import place
from flaxen.core.errors import CheckpointError
from flaxen.shard import make_mesh

NAMES = ["org/one", "org/shards"]
WEIGHTS = ".safetensors"


@pytest.fixture
def served(hub, llama, llama_shards, monkeypatch):
    """The hub with the tiny model, in one file and in three."""
    monkeypatch.setattr(ranges, "WAIT", 0.0)
    hub.add("org/one", llama)
    hub.add("org/shards", llama_shards)
    return hub


@pytest.fixture
def grid(hub, tmp_path, monkeypatch):
    """A file with one tensor, (24, 32, 16) of float32, of which 2 kB are a row."""
    monkeypatch.setattr(ranges, "WAIT", 0.0)
    values = np.arange(24 * 32 * 16, dtype=np.float32).reshape(24, 32, 16)
    (tmp_path / "grid").mkdir()
    save_file({"a": values}, tmp_path / "grid" / "model.safetensors")
    hub.add("org/grid", tmp_path / "grid")
    return values


def load_remote(monkeypatch, name: str, **kwargs):
    remote_only = functools.partial(open_checkpoint, remote=True)
    monkeypatch.setattr("flaxen.pretrained.open_checkpoint", remote_only)
    return flaxen.load(name, **kwargs)


def refused(name: str, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        for tensor in open_checkpoint(name, remote=True, **kwargs).values():
            tensor.read()
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_read_and_no_file_is_kept(served, name, same_weights, tmp_path):
    checkpoint = open_checkpoint(name, remote=True)
    assert same_weights(checkpoint) and checkpoint.config["model_type"] == "llama"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_abstract_model_costs_the_headers(served, name, monkeypatch):
    model = load_remote(monkeypatch, name, abstract=True)
    assert model.num_parameters == 78_144
    assert served.bytes_of(WEIGHTS) == FIRST * (1 if name == "org/one" else 3)
    assert served.bytes_of() < served.bytes_of(WEIGHTS) + 4096


def test_a_long_header_is_read_to_its_end_and_no_further(served, tmp_path):
    (tmp_path / "long").mkdir()
    many = {f"layer.{i}.weight": np.full(64, i, np.float32) for i in range(400)}
    save_file(many, tmp_path / "long" / "model.safetensors")
    served.add("org/long", tmp_path / "long")
    checkpoint = open_checkpoint("org/long", remote=True)
    raw = (tmp_path / "long" / "model.safetensors").read_bytes()
    assert served.bytes_of() == 8 + int.from_bytes(raw[:8], "little") > FIRST
    assert checkpoint["layer.123.weight"].read()[0] == 123
    assert checkpoint.bytes_read == served.bytes_of()


@pytest.mark.parametrize("mesh", ["tp=8", "fsdp=4,tp=2"])
def test_on_a_mesh_each_byte_is_asked_for_once(served, mesh, monkeypatch, llama):
    there, here = load_remote(monkeypatch, "org/one", mesh=mesh), flaxen.load(llama)
    pairs = list(zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True))
    assert all(np.array_equal(a, b) for a, b in pairs)
    data = sum(leaf.nbytes for _, leaf in pairs)
    assert served.bytes_of(WEIGHTS) == FIRST + data


def test_a_device_asks_for_its_rows_alone(grid, hub):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    before = hub.bytes_of()
    part = (slice(3, 6), slice(0, 32), slice(0, 16))
    np.testing.assert_array_equal(tensor.read(part), grid[3:6])
    assert hub.log[-1].sent == hub.bytes_of() - before == 3 * 2048


@pytest.mark.parametrize("gap", [0, 100, 1 << 20])
def test_any_box_is_what_numpy_cuts(grid, monkeypatch, gap):
    monkeypatch.setattr(remote, "GAP", gap)
    monkeypatch.setattr(remote, "PIECE", 5000)
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    cuts = [[(0, 3), (5, 7)], [(0, 32), (1, 3)], [(0, 16), (15, 16), (3, 9)]]
    for bounds in itertools.product(*cuts):
        box = tuple(slice(*pair) for pair in bounds)
        np.testing.assert_array_equal(tensor.read(box), grid[box])
        turned = np.empty(grid[box].shape[::-1], np.float32)
        tensor.permute((2, 1, 0)).read(box[::-1], turned)
        np.testing.assert_array_equal(turned, grid[box].T)


def test_gaps_are_read_where_that_is_cheaper(monkeypatch):
    monkeypatch.setattr(remote, "GAP", 100)

    def grown(*bounds: tuple[int, int]) -> list[tuple[int, int]]:
        box = widened(tuple(slice(*pair) for pair in bounds), (8, 10, 16), 1)
        return [(part.start, part.stop) for part in box]

    assert grown((2, 3), (4, 5), (3, 9)) == [(2, 3), (4, 5), (3, 9)], "one stretch as it is"
    assert grown((2, 3), (4, 6), (3, 9)) == [(2, 3), (4, 6), (0, 16)], "10 bytes between two"
    assert grown((2, 4), (4, 6), (3, 9)) == [(2, 4), (4, 6), (0, 16)], "128 bytes between rows"
    assert grown((2, 4), (0, 6), (0, 16)) == [(2, 4), (0, 10), (0, 16)], "64 bytes between rows"


def test_a_piece_that_neighbours_share_is_asked_for_once(grid, hub):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    before = hub.bytes_of()
    boxes = [(slice(0, 24), slice(i, i + 4), slice(0, 16)) for i in range(0, 32, 4)]
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(tensor.read, boxes))
    np.testing.assert_array_equal(np.concatenate(parts, 1), grid)
    assert hub.bytes_of() - before == grid.nbytes


def test_old_pieces_are_forgotten(grid, hub, monkeypatch):
    monkeypatch.setattr(remote, "RECENT", 3000)
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    before = hub.bytes_of()
    for row in (0, 1, 0):
        tensor.read((slice(row, row + 1), slice(0, 32), slice(0, 4)))
    assert hub.bytes_of() - before == 3 * 2048
    assert tensor.recent._nbytes == 2048


def test_arrays_of_placed_columns_are_those_of_the_file(grid, hub):
    mesh = make_mesh("tp=8")
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tp"))
    placed = place({"a": open_checkpoint("org/grid", remote=True)["a"]}, {"a": cut})
    np.testing.assert_array_equal(placed["a"], grid)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(grid, hub):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    before = hub.bytes_of()
    hub.drop["model.safetensors"] = 4
    np.testing.assert_array_equal(tensor.read(), grid)
    assert hub.bytes_of() - before == grid.nbytes
    assert len([r for r in hub.log if r.path.endswith(WEIGHTS)]) == 6


def test_an_answer_shorter_than_it_says_is_not_taken_for_the_whole(grid, hub):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    hub.short["model.safetensors"] = 2
    np.testing.assert_array_equal(tensor.read(), grid)
    assert hub.short["model.safetensors"] == 0


def test_a_busy_server_is_asked_again_but_not_for_ever(grid, hub):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    hub.busy["model.safetensors"] = 2
    np.testing.assert_array_equal(tensor.read(), grid)
    hub.busy["model.safetensors"] = 10
    with pytest.raises(CheckpointError, match=r"answered 503, 3 times in a row"):
        tensor.read()
    assert hub.busy["model.safetensors"] == 7


def test_a_token_stays_with_the_hub(served, same_weights):
    served.cdn = True
    served.repositories["org/shards"].private = True
    assert same_weights(open_checkpoint("org/shards", remote=True, token=Hub.TOKEN))
    assert {r.authorization for r in served.log if r.cdn} == {None}
    assert {r.authorization for r in served.log if not r.cdn} == {f"Bearer {Hub.TOKEN}"}
    weights = [r for r in served.log if r.path.endswith(WEIGHTS) and not r.cdn]
    assert len(weights) == 3, "each file is resolved once"


def test_an_address_that_expires_is_asked_for_again(served, same_weights):
    served.cdn = True
    checkpoint = open_checkpoint("org/one", remote=True)
    served.expire = 2
    assert same_weights(checkpoint)


def test_a_server_without_ranges_is_refused_before_it_sends_all(served, llama):
    served.ignore_range = True
    size = (llama / "model.safetensors").stat().st_size
    why = refused("org/one")
    assert f"ignores range requests and would send the whole file ({size} bytes)" in why
    assert "Load it without remote=True" in why


def test_other_bytes_than_those_asked_for_are_refused(served):
    served.shift_range = True
    assert "asked for bytes 0 to 16383, the server sent 'bytes 1-16383/" in refused("org/one")


def test_a_file_that_changes_meanwhile_is_refused(grid, hub, tmp_path):
    tensor = open_checkpoint("org/grid", remote=True)["a"]
    with (tmp_path / "grid/model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.read()


def test_a_file_cut_short_is_refused(grid, hub, tmp_path):
    path = tmp_path / "grid/model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "damaged or incomplete" in refused("org/grid")
    os.truncate(path, 4)
    assert "has 4 bytes, too few" in refused("org/grid")


def test_an_index_at_odds_with_its_files_is_refused(served, llama_shards, tmp_path):
    folder = shutil.copytree(llama_shards, tmp_path / "odd")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"weight_map": {**names, "lost": "model-00001-of-00003.safetensors"}})
    )
    served.add("org/odd", folder)
    assert "says that 'lost' is in" in refused("org/odd")


def test_other_formats_must_be_downloaded(hub, tmp_path):
    (tmp_path / "a.gguf").touch()
    hub.add("org/quants", tmp_path)
    assert "no safetensors but a.gguf" in refused("org/quants")


def test_a_web_address_of_one_file(served, same_weights, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
    address = f"{os.environ['HF_ENDPOINT']}/org/one/resolve/main/model.safetensors"
    assert same_weights(open_checkpoint(address, remote=True))
    assert {r.authorization for r in served.log} == {None}
    assert "the server answered 404" in refused(address.replace("model.", "lost."))


@pytest.mark.parametrize("name", ["org/one", "http://127.0.0.1:9/model.safetensors"])
def test_offline_nothing_is_tried(served, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    assert "HF_HUB_OFFLINE" in refused(name)
    assert time.perf_counter() - start < 1 and served.log == []


def test_a_path_here_is_read_here(hub, llama, same_weights):
    checkpoint = open_checkpoint(Path(llama), remote=True)
    assert same_weights(checkpoint) and hub.log == []
