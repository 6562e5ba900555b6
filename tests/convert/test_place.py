"""Placing on devices: every byte once, straight to where it stays."""

from __future__ import annotations

import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.lazy import ByteCounter, LazyTensor, aligned_empty, stack
from flaxen.convert.place import place
from flaxen.convert.relation import Join, relate
from flaxen.convert.save import write_checkpoint
from flaxen.core.errors import CheckpointError
from flaxen.core.tree import param


class Source(LazyTensor):
    """Hands out no memory of its own and remembers how often each element was read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads = np.zeros(array.shape, int)
        self.counter = ByteCounter()

    def fill(self, box, out):
        self.reads[box] += 1
        self.counter.add(out.nbytes)
        out[...] = self.array[box]


def sharding(spec, shape=(4, 2)):
    return jax.NamedSharding(jax.make_mesh(shape, ("fsdp", "tp")), spec)


P = jax.P
SPECS = [P(), P("fsdp"), P(None, "tp"), P("fsdp", "tp"), P("tp", "fsdp"), P(("fsdp", "tp"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_element_is_read_once_whatever_the_sharding(spec):
    source = Source(np.arange(16 * 24, dtype=np.float32).reshape(16, 24))
    got = place({"w": source}, {"w": sharding(spec)})["w"]
    np.testing.assert_array_equal(got, source.array)
    assert got.sharding == sharding(spec)
    assert (source.reads == 1).all()


def test_stacked_experts_go_to_their_devices_read_once():
    experts = [Source(np.full((8, 6), i, np.float32)) for i in range(12)]
    got = place(stack(experts), sharding(P("fsdp", "tp")))
    for shard in got.addressable_shards:
        first = shard.index[0].start
        assert np.asarray(shard.data)[:, 0, 0].tolist() == list(range(first, first + 3))
    assert all((e.reads == 1).all() for e in experts)


def test_fused_qkv_on_two_tensor_parallel_devices():
    one = {"q": ("heads", 4), "k": ("kv_heads", 2), "v": ("kv_heads", 2)}
    tree = {
        n: {"weight": param(f"({a} head_dim) embed", **{a: s, "head_dim": 3, "embed": 8})}
        for n, (a, s) in one.items()
    }
    join = Join(
        "qkv",
        "{q: heads head_dim | k: kv_heads head_dim | v: kv_heads head_dim} embed",
    )
    source = Source(np.repeat(np.arange(24.0)[:, None], 8, 1))
    weights = relate(tree, {"qkv": join}).load({"qkv.weight": source})
    got = place(weights, dict.fromkeys(weights, sharding(P("tp"))))
    for name, start, heads in (("q", 0, 4), ("k", 12, 2), ("v", 18, 2)):
        want = np.arange(start, start + 3 * heads).reshape(heads, 3)
        np.testing.assert_array_equal(got[f"{name}.weight"][..., 0], want)
    assert (source.reads == 1).all()


def test_the_array_is_the_memory_that_was_read_into():
    filled = []

    class Watching(Source):
        def fill(self, box, out):
            filled.append(out.ctypes.data)
            super().fill(box, out)

    got = place(Watching(np.ones((64, 64), np.float32)))
    assert got.unsafe_buffer_pointer() == filled[0]


def test_replicas_on_one_host_share_memory():
    got = place(Source(np.ones((64, 64), np.float32)), sharding(P()))
    assert len({s.data.unsafe_buffer_pointer() for s in got.addressable_shards}) == 1


def test_our_own_folder_is_placed_without_reading(tmp_path):
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(ml_dtypes.bfloat16)
    write_checkpoint({"w": ArrayTensor(values)}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    view = checkpoint["w"].view()
    got = place(dict(checkpoint))["w"]
    assert view is not None and got.unsafe_buffer_pointer() == view.ctypes.data
    np.testing.assert_array_equal(np.asarray(got), values)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(got)
    np.testing.assert_array_equal(np.asarray(doubled), values * 2)
    np.testing.assert_array_equal(open_checkpoint(tmp_path)["w"].read(), values)


def test_an_array_in_use_is_copied_not_shared():
    live = aligned_empty((64, 64), np.dtype(np.float32))
    live[...] = 0
    got = place(ArrayTensor(live))
    live[...] = 1
    assert not np.asarray(got).any()


def test_floats_are_converted_and_nothing_else():
    kinds = {"w": np.float32, "h": np.float16, "i": np.int32, "b": np.bool_}
    got = place({n: Source(np.ones((8, 8), k)) for n, k in kinds.items()}, dtype="bfloat16")
    assert {n: str(a.dtype) for n, a in got.items()} == {
        "w": "bfloat16",
        "h": "bfloat16",
        "i": "int32",
        "b": "bool",
    }


def test_a_large_tensor_is_read_in_slabs_and_progress_adds_up(monkeypatch):
    monkeypatch.setattr("flaxen.convert.place.SLAB", 1000)
    source, seen = Source(np.arange(4000, dtype=np.float32).reshape(50, 80)), []
    got = place([source, ArrayTensor(np.ones(3))], progress=seen.append)
    np.testing.assert_array_equal(got[0], source.array)
    assert sum(seen) == 16000 + 24 and len(seen) > 16 and (source.reads == 1).all()


def test_little_is_on_its_way_at_a_time(monkeypatch):
    monkeypatch.setattr("flaxen.convert.place.AHEAD", 0)
    sources = [Source(np.full((4, 4), i, np.float32)) for i in range(20)]
    got = place(sources)
    assert [float(a[0, 0]) for a in got] == list(range(20))


def test_scalars_empty_tensors_and_missing_shardings_are_placed():
    tree = {"s": ArrayTensor(np.float32([3]).reshape(())), "e": ArrayTensor(np.zeros((0, 2)))}
    got = place(tree, {"s": None, "e": sharding(P())})
    assert got["s"] == 3 and got["s"].devices() == {jax.devices()[0]} and got["e"].shape == (0, 2)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    write_checkpoint({"w": ArrayTensor(np.ones((1000, 3), np.int8))}, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="became shorter"):
        place({"w": checkpoint["w"].crop((slice(1, 999), slice(None)))})


MEMORY = """
import pathlib, sys, jax
from flaxen.convert.formats import source
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.place import place

def memory(what):
    return int(pathlib.Path("/proc/self/status").read_text().split(what)[1].split()[0]) << 10

folder, axis, source.WINDOW = sys.argv[1], int(sys.argv[2]), 1 << 20
where = jax.NamedSharding(jax.make_mesh((8,), ("fsdp",)), jax.P(*[None] * axis, "fsdp"))
place(next(iter(open_checkpoint(folder).values())), where).block_until_ready()
checkpoint = open_checkpoint(folder)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS:")
arrays = place(dict(checkpoint), dict.fromkeys(checkpoint, where))
print(memory("VmHWM:") - before, checkpoint.bytes_read)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("axis", [0, 1])
def test_resident_memory_grows_by_the_model_and_two_tensors_at_most(tmp_path, axis):
    size, count = 8 << 20, 8
    tensors = {f"w{i}": np.full((1024, size // 4096), i, np.float32) for i in range(count)}
    write_checkpoint({n: ArrayTensor(a) for n, a in tensors.items()}, tmp_path, max_shard_size=size)
    # Eight bytes more before the data: nothing in these files can be used where it is mapped.
    for file in tmp_path.glob("*.safetensors"):
        raw = file.read_bytes()
        stop = 8 + int.from_bytes(raw[:8], "little")
        file.write_bytes(stop.to_bytes(8, "little") + raw[8:stop] + b" " * 8 + raw[stop:])
    command = [sys.executable, "-c", MEMORY, tmp_path, str(axis)]
    output = subprocess.run(command, check=True, capture_output=True)
    rise, read = map(int, output.stdout.split())
    assert read == size * count
    assert rise <= size * count + 2 * size + (16 << 20)
