"""Files of torch.save: what PyTorch wrote reads back; anything but tensors is refused."""

from __future__ import annotations

import json
import re
import struct
import time
import zipfile
from pathlib import Path

import golden
import numpy as np
import pytest
import torch_files as files

import flaxen
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.torch_names import DTYPES
from flaxen.core.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data" / "torch"
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
SAVED = {
    "whole": BASE,
    "transposed": BASE.T,
    "sliced": BASE[1:, ::2],
    "row": BASE[2],
    "expanded": np.full((3, 2), 5, np.float32),
    "separate": np.arange(3),
    "parameter": np.array([1, 2], np.float32),
    "noted": np.array([7, 8], np.float32),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("file", ["zip.pt", "stream.pt", "protocol5.pt"])
def test_what_pytorch_saved_reads_back(file):
    checkpoint = open_checkpoint(DATA / file)
    assert list(checkpoint) == list(SAVED)
    for name, expected in SAVED.items():
        got = checkpoint[name].read()
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("file", ["dtypes.pt", "dtypes_stream.pt"])
def test_every_dtype_reads_back(file):
    checkpoint = open_checkpoint(DATA / file)
    assert {f"torch.{name}": tensor.dtype for name, tensor in checkpoint.items()} == DTYPES
    for name, tensor in checkpoint.items():
        # A power of two cannot be 0; 2**-127 stands for it.
        values = tensor.read().astype(complex)
        np.testing.assert_allclose(values, [0, 1, 1, 0], atol=2**-127, err_msg=name)


@pytest.mark.parametrize("file", ["training.pt", "training_stream.pt"])
def test_a_state_dict_is_found_beside_the_state_of_an_optimizer(file):
    checkpoint = open_checkpoint(DATA / file)
    assert set(checkpoint) == {"weight", "bias"}
    np.testing.assert_array_equal(checkpoint["weight"].read(), [[0, 1], [2, 3]])


@pytest.mark.parametrize("name", ["whole", "transposed", "sliced", "expanded"])
def test_a_box_reads_its_own_bytes_alone(name):
    checkpoint = open_checkpoint(DATA / "zip.pt")
    box = (slice(1, 3), slice(0, 2))
    np.testing.assert_array_equal(checkpoint[name].read(box), SAVED[name][box])
    assert checkpoint.bytes_read == 4 * SAVED[name][box].size


def test_tensors_of_one_storage_are_views_of_the_same_memory():
    checkpoint = open_checkpoint(DATA / "zip.pt")
    found = {n: checkpoint[n].mapped(tuple(map(slice, SAVED[n].shape))) for n in SAVED}
    assert np.shares_memory(found["whole"].array, found["transposed"].array)
    assert not np.shares_memory(found["whole"].array, found["separate"].array)


def test_the_other_byte_order_is_turned_round(tmp_path):
    swapped = tmp_path / "big.pt"
    kinds = open_checkpoint(DATA / "dtypes.pt")
    sizes = {str(i): kinds[name].dtype for i, name in enumerate(kinds)}
    with zipfile.ZipFile(DATA / "dtypes.pt") as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            raw = old.read(name)
            if name.endswith("/byteorder"):
                raw = b"big"
            elif "/data/" in name:
                raw = np.frombuffer(raw, sizes[name.rpartition("/")[2]]).byteswap().tobytes()
            new.writestr(name, raw)
    for name, tensor in open_checkpoint(swapped).items():
        np.testing.assert_array_equal(tensor.read(), kinds[name].read(), err_msg=name)
        np.testing.assert_array_equal(tensor.read((slice(1, 3),)), kinds[name].read()[1:3])


REFUSED = {
    "module.pt": "asks for 'torch.nn.modules.linear.Linear'",
    "q.pt": "asks for 'torch._utils._rebuild_qtensor'",
    "sparse.pt": "asks for 'torch._utils._rebuild_sparse_tensor'",
    "conj.pt": "marks such as conj",
    "script.pt": "is a TorchScript program",
}


@pytest.mark.parametrize("file", REFUSED)
def test_what_is_no_plain_tensor_is_refused_by_name(file):
    with pytest.raises(CheckpointError, match=rf"{file}.* {re.escape(REFUSED[file])}"):
        open_checkpoint(DATA / file)


CANARY = b"X\x05\x00\x00\x00touch"
ONE = files.tensor(files.storage("0", "Float", 2), (2,), (1,))
EVIL = {
    "os.system": (b"cos\nsystem\n(" + CANARY + b"tR", "asks for 'os.system'"),
    "posix.system": (b"cposix\nsystem\n(" + CANARY + b"tR", "asks for 'posix.system'"),
    "eval": (b"cbuiltins\neval\n(" + CANARY + b"tR", "asks for 'builtins.eval'"),
    "getattr": (b"cbuiltins\ngetattr\n", "asks for 'builtins.getattr'"),
    "stack global": (files.text("os") + files.text("system") + b"\x93", "asks for 'os.system'"),
    "dotted name": (files.text("torch") + files.text("os.system") + b"\x93", "'torch.os.system'"),
    "name of numbers": (b"K\x01K\x02\x93", "asks for 'what is no name'"),
    "copyreg": (b"ccopyreg\n_reconstructor\n", "asks for 'copyreg._reconstructor'"),
    "a module of torch": (b"ctorch.hub\nload\n", "asks for 'torch.hub.load'"),
    "extension": (b"\x82\x01", "instruction EXT1"),
    "extension of 4 bytes": (b"\x84\x01\0\0\0", "instruction EXT4"),
    "instance": (b"(ios\nsystem\n", "instruction INST"),
    "object": (b"(cos\nsystem\no", "asks for 'os.system'"),
    "new object": (files.name("torch", "Size") + b")\x81", "instruction NEWOBJ"),
    "text id": (b"P1\n", "instruction PERSID"),
    "old strings": (b"S'a'\n", "instruction STRING"),
    "unknown instruction": (b"\xff", "instruction b'\\xff'"),
    "attributes of a tensor": (ONE + b"}b", "sets attributes of something else"),
    "attributes of a name": (files.name("torch", "Size") + b"}b", "sets attributes of"),
    "call of text": (files.text("eval") + b")R", "calls no function"),
    "call of a dtype": (files.name("torch", "float32") + b")R", "calls torch.float32"),
    "call without arguments": (files.name("torch", "Size") + b"NR", "with no arguments"),
    "wrong number of arguments": (files.name("torch", "Size") + b")R", "with 0 arguments"),
    "rebuilding within": (
        files.name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + files.name("torch._tensor", "_rebuild_from_type_v2")
        + files.name("torch", "Tensor")
        + b"))tR",
        "by no function for that",
    ),
    "storage by a number": (b"K\x05Q", "something else than a storage"),
    "storage of a dtype": (
        b"(" + files.text("storage") + files.name("torch", "float32") + b"NNNtQ",
        "something else than a storage",
    ),
    "tensor of no storage": (files.tensor(b"N", (2,), (1,)), "something else than a storage"),
    "negative size": (files.tensor(files.storage("0", "Float", 2), (-2,), (1,)), "are no counts"),
    "negative stride": (files.tensor(files.storage("0", "Float", 2), (2,), (-1,)), "no counts"),
    "strides too few": (files.tensor(files.storage("0", "Float", 2), (2, 1), (1,)), "no counts"),
    "list as key": (b"}]Ns", "dictionary key of type list"),
    "nested tuples as key": (b"})" + b"\x85" * 100 + b"Ns", "dictionary key of type tuple"),
    "append to a tensor": (ONE + b"Na", "appends to something else"),
    "item of a list": (b"]" + files.text("a") + b"Ns", "sets items of something else"),
}


@pytest.mark.parametrize("case", EVIL)
@pytest.mark.parametrize("kind", ["zip", "stream"])
def test_a_pickle_that_asks_for_more_is_refused_and_nothing_runs(tmp_path, monkeypatch, case, kind):
    monkeypatch.chdir(tmp_path)
    code, message = EVIL[case]
    path = tmp_path / "evil.pt"
    code = code.replace(CANARY, files.text("touch canary"))
    if kind == "zip":
        files.archive(path, files.pickled(code), {"0": b"\0" * 8})
    else:
        path.write_bytes(files.pickled(code))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(path)
    assert not (tmp_path / "canary").exists()


BROKEN = {
    "empty": b"",
    "stop without a value": b".",
    "no stop": b"N",
    "pop of nothing": b"0N.",
    "tuple of nothing": b"\x87.",
    "mark that is not there": b"t.",
    "memo that is not there": b"h\x07.",
    "text cut short": b"X\xff\xff\xff\xffab.",
    "text longer than any file": b"\x8d" + b"\xff" * 8,
    "text that is no UTF-8": b"X\x01\0\0\0\xff.",
    "name without an end": b"c" + b"a" * 5000,
    "odd number of items": b"}(N" + b"u.",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_pickle_is_refused(tmp_path, case):
    with pytest.raises(CheckpointError, match="cannot be followed at byte"):
        open_checkpoint(files.archive(tmp_path / "x.pt", b"\x80\x02" + BROKEN[case]))


MANY = b"(" + b"K\x01" * 100_000 + b"tq\x00"
BOMBS = {
    "deep nesting": (b"(" * 200_000 + b"t" * 200_000, "holds a tuple"),
    "the same list in itself": (b"]" + b"q\x00h\x00h\x00a" * 80_000, "holds a list"),
    "doubled tuples": (b")" + b"2\x86" * 100_000, "holds a tuple"),
    "copies of a dictionary": (
        b"("
        + b"".join(b"(" + files.number(i) + b"Nt" for i in range(1000))
        + b"lq\x00"
        + b"ccollections\nOrderedDict\n(h\x00tR" * 50_000,
        "more than 500000 instructions",
    ),
    "a size of many": (
        MANY + b"ctorch\nSize\nq\x01h\x00\x85q\x02" + b"h\x01h\x02R" * 50_000,
        "something else than counts",
    ),
    "a shape of many": (
        MANY
        + files.name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + files.name("torch._utils", "_rebuild_tensor")
        + files.name("torch", "Tensor")
        + b"("
        + files.storage("0", "Float", 2)
        + b"K\x00h\x00h\x00tNtR",
        "are no counts",
    ),
    "endless instructions": (b"N0" * 10_000_000 + b"N", "more than 500000 instructions"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_pickle_cannot_ask_for_endless_work(tmp_path, monkeypatch, case):
    monkeypatch.setattr("flaxen.convert.formats.torch_pickle.MAX_STEPS", 500_000)
    code, message = BOMBS[case]
    path = files.archive(tmp_path / "x.pt", files.pickled(code))
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
    assert time.process_time() - start < 5


OUTSIDE = {
    "beyond its storage": (ONE.replace(files.counts((2,)), files.counts((3,))), "reaches beyond"),
    "offset beyond": (
        files.tensor(files.storage("0", "Float", 2), (2,), (1,), 1),
        "reaches beyond",
    ),
    "stride beyond": (files.tensor(files.storage("0", "Float", 2), (2,), (2,)), "reaches beyond"),
    "huge stride": (files.tensor(files.storage("0", "Float", 2), (2,), (2**62,)), "reaches"),
    "expanded without end": (
        files.tensor(files.storage("0", "Float", 2), (2**40,), (0,)),
        "larger than the whole file",
    ),
    "no values, and no end of rows": (
        files.tensor(files.storage("0", "Float", 2), (0, 2**62), (1, 1)),
        "says it has the shape",
    ),
    "absent storage": (files.tensor(files.storage("7", "Float", 2), (2,), (1,)), "not there"),
    "storage of another size": (
        files.tensor(files.storage("0", "Float", 3), (2,), (1,)),
        "12 bytes of 'a' are not there",
    ),
    "storage by a path": (
        files.tensor(files.storage("../data.pkl", "Float", 2), (2,), (1,)),
        "not there",
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_tensor_outside_its_storage_is_refused_by_name(tmp_path, case):
    code, message = OUTSIDE[case]
    pickle = files.pickled(files.table({"a": code}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(files.archive(tmp_path / "x.pt", pickle, {"0": b"\0" * 8}))


def test_the_stride_of_an_axis_of_one_place_does_not_matter(tmp_path):
    code = files.tensor(files.storage("0", "Float", 2), (1, 2), (2**62, 1))
    pickle = files.pickled(files.table({"a": code}))
    path = files.archive(tmp_path / "x.pt", pickle, {"0": struct.pack("<2f", 1, 2)})
    assert open_checkpoint(path)["a"].read().tolist() == [[1, 2]]


CONTENTS = {
    "a tensor alone": (ONE, "holds a tensor alone"),
    "numbers beside tensors": (files.table({"a": ONE, "lr": b"K\x01"}), "'lr' \\(int\\)"),
    "nested": (files.table({"net": files.table({"a": ONE})}), "'net' \\(dict\\)"),
    "nothing": (b"}", "an empty dictionary"),
    "two state dicts": (
        files.table({"model": files.table({"a": ONE}), "state_dict": files.table({"a": ONE})}),
        "'model' \\(dict\\), 'state_dict' \\(dict\\)",
    ),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_what_is_no_flat_state_dict_is_refused_with_what_it_holds(tmp_path, case):
    code, message = CONTENTS[case]
    path = files.archive(tmp_path / "x.pt", files.pickled(code), {"0": b"\0" * 8})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_text_of_python_2_reads_as_text(tmp_path):
    pair = b"(U\x01a" + ONE + b"l"
    code = files.name("collections", "OrderedDict") + b"((" + pair + b"ltR"
    path = files.archive(tmp_path / "x.pt", files.pickled(code), {"0": b"\0" * 8})
    np.testing.assert_array_equal(open_checkpoint(path)["a"].read(), [0, 0])


def test_attributes_of_an_ordered_dict_are_left_out(tmp_path):
    bare = files.name("collections", "OrderedDict") + b")R"
    code = bare + files.text("a") + ONE + b"s" + files.table({"_metadata": b"}"}) + b"b"
    path = files.archive(tmp_path / "x.pt", files.pickled(code), {"0": b"\0" * 8})
    assert list(open_checkpoint(path)) == ["a"]


def zipped(path: Path, entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, raw in entries:
            file.writestr(name, raw)
    return path


GOOD = [
    ("x/data.pkl", files.pickled(files.table({"a": ONE}))),
    ("x/data/0", struct.pack("<2f", 1, 2)),
]


def test_a_compressed_entry_is_refused_by_name(tmp_path):
    path = zipped(tmp_path / "x.pt", [*GOOD, ("x/data/1", b"\0" * 10**7)], zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="'x/data.pkl' is compressed"):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'x/data/0' stands twice"):
        open_checkpoint(zipped(tmp_path / "x.pt", [*GOOD, GOOD[1]]))


def test_a_zip_without_a_pickle_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"0 entries are called data\.pkl"):
        open_checkpoint(zipped(tmp_path / "x.pt", GOOD[1:]))


def directory_field(raw: bytes, entry: int, at: int, value: int) -> bytes:
    """The zip file with another 4-byte number in the directory's record of an entry."""
    start = [m.start() for m in re.finditer(b"PK\1\2", raw)][entry] + at
    return raw[:start] + struct.pack("<I", value) + raw[start + 4 :]


def test_entries_that_overlap_or_leave_the_file_are_refused(tmp_path):
    raw = zipped(tmp_path / "x.pt", GOOD).read_bytes()
    assert open_checkpoint(tmp_path / "x.pt")["a"].read().tolist() == [1, 2]
    size = len(GOOD[0][1]) + 20
    longer = directory_field(directory_field(raw, 0, 20, size), 0, 24, size)
    outside = directory_field(directory_field(raw, 1, 20, 10**6), 1, 24, 10**6)
    for changed, message in [
        (longer, "'x/data/0' overlaps"),
        (outside, "'x/data/0' overlaps another part"),
        (directory_field(raw, 1, 42, 0), "another name in the directory"),
        (directory_field(raw, 1, 42, 2**31), "before what it speaks of"),
        (directory_field(raw, 1, 42, 5), "no zip header stands at byte 5"),
        (raw[:-30], "no zip directory"),
        (raw.replace(b"PK\1\2", b"PK\1\3"), "no list of entries"),
    ]:
        (tmp_path / "x.pt").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / "x.pt")


def test_sizes_of_the_64_bit_extension_are_followed(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        for name, raw in GOOD:
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                entry.write(raw)
    raw = (tmp_path / "x.pt").read_bytes()
    start = raw.index(b"PK\1\2")
    record = start + 46 + len("x/data.pkl")
    extra = struct.pack("<2H3Q", 1, 24, len(GOOD[0][1]), len(GOOD[0][1]), 0)
    large = raw[:start] + raw[start : start + 20] + b"\xff" * 8 + raw[start + 28 : start + 30]
    large += struct.pack("<H", 28) + raw[start + 32 : start + 42] + b"\xff" * 4
    large += raw[start + 46 : record] + extra + raw[record : raw.index(b"PK\5\6")]
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(large) - start, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(large), 1)
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    (tmp_path / "x.pt").write_bytes(large + end + locator + tail)
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert file.read("x/data.pkl") == GOOD[0][1]
    assert open_checkpoint(tmp_path / "x.pt")["a"].read().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"<html>", "no file of torch.save"),
        (b"\0" * 257 + b"ustar\0" + b"\0" * 300, "tar file of PyTorch before 0.1.10"),
        (files.pickled(b"}"), "a pickle, but none of torch.save"),
        (b"\x80\x02", "cannot be followed"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path, raw, message):
    (tmp_path / "pytorch_model.bin").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("size", range(0, 1590, 53))
def test_a_stream_cut_short_is_refused(tmp_path, size):
    (tmp_path / "x.pt").write_bytes((DATA / "stream.pt").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_folder_gives_the_models_logits(tmp_path):
    case = golden.case("llama")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    files.save(case.weights, tmp_path / "pytorch_model.bin")
    model = flaxen.load(tmp_path)
    logits, _, _ = golden.logits_loss_and_gradients(case, model)
    real = case.arrays["attention_mask"] > 0
    np.testing.assert_allclose(logits[real], case.arrays["logits"][real], atol=2e-5, rtol=2e-5)
    model.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    for name, tensor in open_checkpoint(tmp_path / "saved").items():
        assert tensor.read().tobytes() == case.weights[name].tobytes()


def sharded(folder: Path) -> Path:
    for i, name in enumerate("ab"):
        files.save({name: np.full(3, i, np.int8)}, folder / f"pytorch_model-{i}.bin")
    index = {"weight_map": {"a": "pytorch_model-0.bin", "b": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_found_by_their_index(tmp_path):
    found = open_checkpoint(sharded(tmp_path))
    assert {name: tensor.read()[0] for name, tensor in found.items()} == {"a": 0, "b": 1}


def test_an_absent_shard_is_named(tmp_path):
    (sharded(tmp_path) / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"not there: pytorch_model-1\.bin"):
        open_checkpoint(tmp_path)


def test_safetensors_are_preferred(tmp_path):
    golden.save_file({"a": np.full(3, 9, np.int8)}, sharded(tmp_path) / "model.safetensors")
    assert open_checkpoint(tmp_path)["a"].read()[0] == 9
