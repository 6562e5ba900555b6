"""A file is written as a whole, or an older one stays."""

from __future__ import annotations

import os

import pytest

from flaxen.core.whole_file import whole_file


def test_a_file_comes_into_being_when_all_is_written(tmp_path):
    path = tmp_path / "out.txt"
    with whole_file(path) as aside:
        aside.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["out.txt"]


def test_an_older_file_stays_when_writing_stops(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), whole_file(path) as aside:
        aside.write_text("ne")
        raise OSError("the disk is full")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.txt"]


def test_what_a_link_leads_to_is_written(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as aside:
        aside.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with whole_file(tmp_path / "pipe") as aside:
        assert aside == tmp_path / "pipe"
    assert (tmp_path / "pipe").is_fifo()
