"""The folder of a run belongs to one run at a time, and what it exports is whole or not there."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager

import jax.numpy as jnp
import pytest
from interrupted_run import SETTINGS
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.core.errors import CheckpointError, InputError
from flaxen.families import find
from flaxen.show import loss_picture
from flaxen.train import train
from flaxen.train.checkpoint import Checkpoints
from flaxen.train.run.folder import check_output, only_run
from flaxen.tune import add_lora, save_adapter


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def room_for(nbytes):
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_second_run_does_not_begin_in_the_same_folder(tmp_path):
    data, output = tmp_path / "a.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"text": f"w1 w{i} w3"}) + "\n" for i in range(10, 20)))
    checkpoints = Checkpoints(output / "checkpoints", {})
    with only_run(output, checkpoints, 0):
        before = files(output)
        with pytest.raises(CheckpointError, match="run is being written by another process"):
            train(tiny(), word_tokenizer(90), data, output=output, **SETTINGS)
        assert files(output) == before
    with only_run(output, checkpoints, 0):
        pass
    assert files(output) == {}


def test_a_run_does_not_go_on_from_what_another_has_passed(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", {}) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(2)})
    checkpoints = Checkpoints(tmp_path / "checkpoints", {})
    with (
        pytest.raises(CheckpointError, match="Another run went on in"),
        only_run(tmp_path, checkpoints, 0),
    ):
        pass
    with only_run(tmp_path, checkpoints, 3):
        pass


QUICK = SETTINGS | {"lora_targets": ["q_proj"], "accumulation": 1, "steps": 4, "save_every": 0}


def test_a_bad_document_of_a_stream_keeps_the_steps_before_it(tmp_path):
    """512 documents are encoded together, so that one behind them comes while steps are taken."""
    data, output = tmp_path / "a.jsonl", tmp_path / "run"
    texts = [json.dumps({"text": "w10 w11 w12 w13 w14 w15 w16"}) + "\n" for _ in range(600)]
    data.write_text("".join([*texts[:515], "nonsense\n"]))
    streamed = QUICK | {"streaming": True, "shuffle_buffer": 1, "steps": 300, "output": output}
    with pytest.raises(InputError, match=r"a\.jsonl:516: not JSON"):
        train(tiny(), word_tokenizer(90), data, **streamed)
    (step,) = Checkpoints(output / "checkpoints", {}).steps()
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert step > 100


def test_a_finished_run_whose_log_is_gone_is_exported_again(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": "w10 w11 w12"}) + "\n")
    run = lambda: train(
        tiny(), word_tokenizer(90), data, output=tmp_path / "run", resume=True, **QUICK
    )
    first = run()
    first.log_path.unlink()
    again = run()
    assert (again.step, again.finished, again.losses) == (4, True, [])
    assert again.picture_path is None and again.model_path.exists()


def test_what_was_exported_is_not_replaced_by_another_run(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    check_output(tmp_path)
    (tmp_path / "adapter").mkdir()
    with pytest.raises(CheckpointError, match="holds adapter, but no checkpoint of its run"):
        check_output(tmp_path)


def test_a_full_disk_leaves_the_adapter_that_was_there(tmp_path):
    adapted, names = add_lora(tiny().module, rank=4), find("llama").names
    save_adapter(adapted, tmp_path, names)
    before = files(tmp_path)
    with room_for(5000), pytest.raises(CheckpointError, match="cannot be written .*too large"):
        save_adapter(adapted, tmp_path, names)
    assert files(tmp_path) == before


def test_a_full_disk_leaves_the_picture_that_was_there(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n')
    loss_picture(log, tmp_path / "loss.png")
    before = files(tmp_path)
    with room_for(500), pytest.raises(OSError, match="too large"):
        loss_picture(log, tmp_path / "loss.png")
    assert files(tmp_path) == before
