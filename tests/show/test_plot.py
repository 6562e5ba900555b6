"""The picture of the loss."""

from __future__ import annotations

import json

import pytest

from flaxen.core.errors import InputError
from flaxen.show import loss_picture
from flaxen.show.curves import read_log, smoothed


def write(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)
    return path


def test_a_log_becomes_a_picture(tmp_path):
    rows = [{"step": i, "loss": 3 / (i + 1)} for i in range(20)] + [{"step": 20, "eval_loss": 0.2}]
    png = loss_picture(write(tmp_path / "log.jsonl", rows), tmp_path / "new" / "loss.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_reward_is_drawn_above_the_loss_with_its_spread(tmp_path):
    rows = [{"step": i, "loss": 0.0, "reward": i / 9, "reward_std": 0.1} for i in range(9)]
    of = lambda name, rows: loss_picture(write(tmp_path / name, rows), tmp_path / f"{name}.png")
    both = of("a", [*rows, {"step": 9, "eval_reward": 0.9}])
    alone = of("b", [{"step": row["step"], "loss": 0.0} for row in rows])
    height = lambda png: int.from_bytes(png.read_bytes()[20:24], "big")
    assert height(both) == 2 * height(alone)


def test_a_half_written_line_is_left_out(tmp_path):
    log = write(tmp_path / "log.jsonl", [{"step": 0, "loss": 1.0}], end='\n{"step": 1, "lo')
    assert read_log(log) == [{"step": 0, "loss": 1.0}]


def test_a_log_without_a_loss_is_an_error(tmp_path):
    log = write(tmp_path / "log.jsonl", [{"step": 0}])
    with pytest.raises(InputError, match="nothing to draw"):
        loss_picture(log, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_the_running_mean_of_a_constant_is_that_constant():
    assert smoothed((2.0,) * 5) == pytest.approx([2.0] * 5)
