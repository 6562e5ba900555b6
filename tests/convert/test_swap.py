"""A folder is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_arrays import arrays, contents, lazy, raw

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.save import write_checkpoint
from flaxen.core.errors import CheckpointError

SCRIPT = Path(__file__).parent.parent / "killed_saves.py"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/out cannot be written"):
        write_checkpoint(lazy(arrays()), tmp_path / "file" / "out")


def test_a_disk_that_is_full_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flaxen.convert.formats.writing._write", full)
    with pytest.raises(CheckpointError, match="out cannot be written.*No space left.*unchanged"):
        write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_stale_shards_go_and_foreign_files_stay(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path / "out", max_shard_size=1000)
    foreign = tmp_path / "out" / "runs" / "log.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    (tmp_path / "out" / "adapter_model.safetensors").write_text("mine too")
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "runs",
        "adapter_model.safetensors",
        "model.safetensors",
    }
    assert foreign.read_text() == "mine"
    assert contents(tmp_path / "out") == raw(arrays(1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_can_be_written_over_itself(tmp_path):
    write_checkpoint(lazy(arrays()), tmp_path, config={"a": 1})
    write_checkpoint(open_checkpoint(tmp_path), tmp_path, config={"a": 2}, copy_from=tmp_path)
    assert contents(tmp_path) == raw(arrays()) and open_checkpoint(tmp_path).config == {"a": 2}


def test_the_folder_that_is_the_working_directory_can_be_replaced(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    write_checkpoint(lazy(arrays(1)), ".")
    assert contents(".") == raw(arrays(1))


def test_a_working_directory_inside_the_folder_stays_in_it(tmp_path, monkeypatch):
    (tmp_path / "out" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "inner")
    write_checkpoint(lazy(arrays(1)), "..")
    assert contents("..") == raw(arrays(1)) and Path.cwd() == tmp_path / "out" / "inner"


def test_a_process_whose_working_directory_is_gone_can_save(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays(1))


def test_where_a_file_system_is_mounted_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("os.path.ismount", lambda place: str(place) == str(tmp_path / "volume"))
    with pytest.raises(CheckpointError, match="Choose a folder inside"):
        write_checkpoint(lazy(arrays()), tmp_path / "volume")
    write_checkpoint(lazy(arrays()), tmp_path / "volume" / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["volume"]


@pytest.mark.parametrize("place", ["/", "nul\0", "~nobody-of-this-name/out", "loop"])
def test_what_can_be_no_folder_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError):
        write_checkpoint(lazy(arrays()), place)


def test_a_folder_that_is_replaced_while_it_is_opened_is_no_mixture(tmp_path, monkeypatch):
    def save(seed):
        write_checkpoint(lazy(arrays(seed)), tmp_path / "out", max_shard_size=300)

    save(0)
    from flaxen.convert.formats import folder

    opened = []

    class Late(folder.FileMap):
        """The second file is opened after another process has saved."""

        def __init__(self, *args):
            opened.append(args)
            if len(opened) == 2:
                save(1)
            super().__init__(*args)

    monkeypatch.setattr(folder, "FileMap", Late)
    assert contents(tmp_path / "out") == raw(arrays(1))


def test_a_folder_that_is_replaced_without_end_is_given_up(tmp_path, monkeypatch):
    from flaxen.convert.formats import folder

    write_checkpoint(lazy(arrays()), tmp_path / "out")
    monkeypatch.setattr("os.path.samestat", lambda *_: False)
    with pytest.raises(CheckpointError, match="replaced again and again"):
        folder.open_folder(tmp_path / "out", "", "model.safetensors", "", lambda _: ({}, {}))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_an_error_at_any_moment_leaves_the_old_checkpoint(tmp_path, after):
    write_checkpoint(lazy(arrays()), tmp_path / "out", config={"old": 1}, max_shard_size=1000)
    left = [after]

    def stop(_):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(
            lazy(arrays(1)),
            tmp_path / "out",
            config={"new": 1},
            generation_config={"new": 1},
            max_shard_size=1000,
            progress=stop,
        )
    assert contents(tmp_path / "out") == raw(arrays())
    assert open_checkpoint(tmp_path / "out").config == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_killed_saves_leave_the_old_checkpoint_or_the_new_one(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path, "8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not run.returncode and run.stdout.startswith("8 kills:"), run.stderr


def killed_save(folder):
    """What a process that died while it was writing leaves; gives the names beside `folder`."""
    code = f"""
import os, sys
sys.path.append({str(SCRIPT.parent)!r})
from killed_saves import Constant, write_checkpoint
tensors = {{n: Constant(1, 1) for n in "ab"}}
write_checkpoint(tensors, {str(folder)!r}, config={{}}, progress=lambda _: os._exit(9))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    return {p.name for p in folder.parent.iterdir()} - {folder.name}


def test_what_a_killed_save_left_goes_with_the_next_one_and_nothing_else_does(tmp_path):
    (tmp_path / ".out.0123abcd").mkdir()
    write_checkpoint(lazy(arrays()), tmp_path / "out", config={"old": 1})
    assert len(killed_save(tmp_path / "out")) == 3
    assert contents(tmp_path / "out") == raw(arrays())
    assert open_checkpoint(tmp_path / "out").config == {"old": 1}
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.0123abcd"}


def test_what_was_left_by_another_host_is_not_touched(tmp_path, monkeypatch):
    left = killed_save(tmp_path / "out")
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"out", *left} - {".out.lock"}


def test_of_two_that_save_to_one_folder_the_second_is_refused(tmp_path):
    started, go_on = threading.Event(), threading.Event()

    def wait(_):
        started.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as other:
        first = other.submit(write_checkpoint, lazy(arrays()), tmp_path / "out", progress=wait)
        assert started.wait(60)
        with pytest.raises(CheckpointError, match="out is being written by another process"):
            write_checkpoint(lazy(arrays(1)), tmp_path / "out")
        go_on.set()
        first.result()
    assert contents(tmp_path / "out") == raw(arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_written_beside_replace_the_copied_ones_and_share_nothing(tmp_path):
    def write(folder):
        (folder / "tokenizer.json").write_text("new")
        (folder / "more").mkdir()
        (folder / "more" / "a.jinja").write_text("a")

    write_checkpoint(lazy(arrays()), tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("old")
    os.link(tmp_path / "out" / "tokenizer.json", tmp_path / "linked")
    write_checkpoint(lazy(arrays()), tmp_path / "out", write_beside=write)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"
    assert (tmp_path / "out" / "more" / "a.jinja").read_text() == "a"
    assert (tmp_path / "linked").read_text() == "old"
    assert not (tmp_path / "out" / ".beside").exists()


def test_where_folders_cannot_swap_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr("flaxen.convert.swap._exchange", lambda a, b: False)
    write_checkpoint(lazy(arrays()), tmp_path / "out")
    write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays(1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failure_between_the_two_renames_brings_the_old_folder_back(tmp_path, monkeypatch):
    write_checkpoint(lazy(arrays()), tmp_path / "out")

    def fail(path, target):
        if path.name != "out" and not path.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return os.rename(path, target)

    monkeypatch.setattr("flaxen.convert.swap._exchange", lambda a, b: False)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="out cannot be written"):
        write_checkpoint(lazy(arrays(1)), tmp_path / "out")
    assert contents(tmp_path / "out") == raw(arrays())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_in_the_way_is_not_overwritten(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(lazy(arrays()), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
