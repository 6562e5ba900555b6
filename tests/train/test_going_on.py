"""Going on: which runs may, what comes back, and what else lies in a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import interrupted_run
import jax
import numpy as np
import pytest
from interrupted_run import SETTINGS
from stored_state import stored_state
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.cli import main
from flaxen.core.errors import CheckpointError, FlaxenError
from flaxen.core.tree import paths
from flaxen.train import OPTIMIZERS, Result, TrainConfig, train
from flaxen.train.checkpoint import Checkpoints
from flaxen.train.run.going_on import check_processes, check_steps
from flaxen.train.step import make_trainer, place_batch

SCRIPT = Path(interrupted_run.__file__)
QUICK = SETTINGS | {"lora_rank": 2, "lora_targets": ["q_proj"], "accumulation": 1, "steps": 4}
MESH = "fsdp=4,tp=2"


@pytest.fixture(scope="module")
def tok():
    return word_tokenizer(90)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    texts = [" ".join(f"w{10 + (i * j) % 70}" for j in range(7)) for i in range(24)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def losses(output: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def same_state(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for path, array in left.items():
        np.testing.assert_array_equal(array, right[path], err_msg=path)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_field_of_a_state_comes_back_where_it_was(optimizer, tmp_path):
    config = TrainConfig(output="unused", optimizer=optimizer, loss_scale=8.0)
    model = tiny(mesh=MESH)
    _, state = make_trainer(model.module, model.runtime, config, 10)
    draw = np.random.default_rng(0)
    other = lambda x: jax.device_put((8 * draw.random(x.shape)).astype(x.dtype), x.sharding)
    given = jax.tree.map(other, state)
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(7, given)
    step, back = Checkpoints(tmp_path, {}).restore(like=state)
    want, got = paths(given), paths(back)
    assert step == 7 and got.keys() == want.keys()
    assert {path.partition(".")[0] for path in want} >= {
        field.name for field in dataclasses.fields(state) if field.name != "opt_state"
    }
    for path, x in want.items():
        np.testing.assert_array_equal(got[path], x, err_msg=path)
        assert got[path].dtype == x.dtype and got[path].sharding == x.sharding, path
    _moments_lie_as_weights_do(got)
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in got.values()]
    assert len(set(pointers)) == len(pointers)


def _moments_lie_as_weights_do(state: dict[str, jax.Array]) -> None:
    weights = {p.removeprefix("trained."): x for p, x in state.items() if p.startswith("trained.")}
    for path, x in state.items():
        if path.startswith("opt_state"):
            owner = next((w for p, w in weights.items() if path.endswith(f".{p}")), None)
            if owner is not None and owner.shape == x.shape:
                assert x.sharding == owner.sharding, path


def test_a_checkpoint_says_where_it_comes_from(tok, data, tmp_path):
    train(tiny(), tok, data, output=tmp_path, **QUICK | {"steps": 2, "seed": 3})
    about = Checkpoints(tmp_path / "checkpoints", {}).folder / "step_00000002" / "about"
    told = json.loads((about / "metadata").read_text())
    assert told["step"] == told["data"]["step"] == told["steps"] == 2
    assert told["seed"] == 3 and told["processes"] == 1 and told["runtime"]
    assert told["settings"]["optimizer"] == "adamw"


def test_full_training_with_noise_goes_on_bit_by_bit(tok, data, tmp_path):
    """Killed at step 6 of 9, in the middle of an epoch and of the noise of NEFTune."""
    more = {"lora_rank": None, "neftune_alpha": 5.0, "steps": 9}
    train(tiny(), tok, data, output=tmp_path / "whole", **SETTINGS | more)
    killed = run_in_a_process(tmp_path / "killed", data, 6, more)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Checkpoints(tmp_path / "killed" / "checkpoints", {}).steps() == [4]
    train(tiny(), tok, data, output=tmp_path / "killed", resume=True, **SETTINGS | more)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    same_state(stored_state(tmp_path / "whole", 9), stored_state(tmp_path / "killed", 9))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tok, data, tmp_path):
    settings = QUICK | {"steps": 10}
    killed = run_in_a_process(tmp_path, data, "writing", settings)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left[0] == "step_00000004" and "tmp" in left[1] and len(left) == 2
    assert Checkpoints(tmp_path / "checkpoints", {}).steps() == [4]
    assert train(tiny(), tok, data, output=tmp_path, resume=True, **settings).finished
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_00000008", "step_00000010"]


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path):
    state = {"w": jax.numpy.asarray(np.random.default_rng(0).normal(size=(256, 256)))}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
            checkpoints.save(2, state)
            with pytest.raises(CheckpointError, match="cannot be written: File too large. Those"):
                checkpoints.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert Checkpoints(tmp_path, {}).restore(like=state)[0] == 1
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(3, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def run_in_a_process(output: Path, data: Path, when: int | str, more: dict):
    command = [sys.executable, SCRIPT, output, data, str(when), json.dumps(more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_a_run_goes_on_across_another_mesh(tok, data, tmp_path):
    settings = SETTINGS | {"batch_size": 8, "accumulation": 1, "lora_rank": None, "steps": 6}
    settings |= {"save_every": 3, "schedule": "constant"}
    whole = train(tiny(mesh="fsdp=8"), tok, data, output=tmp_path / "whole", **settings)
    part = tmp_path / "part"
    train(tiny(mesh="fsdp=8"), tok, data, output=part, **settings | {"steps": 3})
    rest = train(tiny(mesh="tp=4,fsdp=2"), tok, data, output=part, resume=True, **settings)
    assert rest.losses[:3] == whole.losses[:3]
    np.testing.assert_allclose(rest.losses[3:], whole.losses[3:], atol=1e-6, rtol=0)


@pytest.mark.exhaustive
def test_a_finished_run_is_made_longer(tok, data, tmp_path):
    settings = QUICK | {"schedule": "constant"}
    whole = train(tiny(), tok, data, output=tmp_path / "whole", **settings)
    part = settings | {"output": tmp_path / "part"}
    assert train(tiny(), tok, data, **part | {"steps": 2}).finished
    assert train(tiny(), tok, data, resume=True, **part).losses == whole.losses
    same_state(stored_state(tmp_path / "whole", 4), stored_state(tmp_path / "part", 4))
    with pytest.raises(CheckpointError, match="less than were taken"):
        train(tiny(), tok, data, resume=True, **part | {"steps": 3})


@pytest.mark.parametrize(
    ("schedule", "done", "may"),
    [("constant", 9, True), ("wsd", 8, True), ("wsd", 10, False), ("cosine", 4, False)],
)
def test_steps_may_change_if_those_taken_do_not(schedule, done, may, tmp_path):
    """A run of 10 steps to be made one of 20; wsd falls after step 8."""
    config = TrainConfig(output="unused", schedule=schedule, decay_share=0.2, warmup=2)
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(done, {"w": jax.numpy.ones(2)}, {"steps": 10})
    checkpoints = Checkpoints(tmp_path, {})
    check_steps(checkpoints, config, 10)
    if may:
        check_steps(checkpoints, config, 20)
    else:
        with pytest.raises(CheckpointError, match="steps=10"):
            check_steps(checkpoints, config, 20)


@pytest.mark.exhaustive
def test_the_checkpoint_of_the_least_loss_on_held_out_data_stays(tok, data, tmp_path):
    more = {"learning_rate": 3.0, "warmup": 0, "schedule": "constant", "save_every": 1, "keep": 1}
    settings = QUICK | more | {"eval_every": 1, "keep_best": 1}
    result = train(tiny(), tok, data, eval_data=data, output=tmp_path, **settings)
    losses = {row["step"]: row["eval_loss"] for row in result.rows if "eval_loss" in row}
    best = min(range(1, 5), key=losses.__getitem__)
    assert best < 4
    assert Checkpoints(tmp_path / "checkpoints", {}).steps() == [best, 4]


def test_another_optimizer_is_refused(tok, data, tmp_path):
    train(tiny(), tok, data, output=tmp_path, **QUICK | {"steps": 1})
    with pytest.raises(CheckpointError, match="optimizer: found 'adamw', expected 'lion'"):
        settings = QUICK | {"steps": 1, "optimizer": "lion"}
        train(tiny(), tok, data, output=tmp_path, resume=True, **settings)


@pytest.mark.parametrize(
    ("mesh", "second", "said"),
    [
        (None, "{settings} 3", "not on all their devices"),
        (MESH, "other 3", "Process 1 has other settings, another model or other data"),
        (MESH, "{settings} 0", "Process 1 sees a checkpoint of step 0 in .* process 0 one of 3"),
    ],
)
def test_processes_that_do_not_fit_together_do_not_begin(mesh, second, said, tmp_path, monkeypatch):
    class Two:
        def gather(self, text):
            return [text, second.format(settings=text.split()[0])]

    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(3, {"w": jax.numpy.ones(2)})
    runtime = tiny(mesh=mesh).runtime
    monkeypatch.setattr("flaxen.train.run.going_on.Processes", Two)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(FlaxenError, match=said):
        check_processes(Checkpoints(tmp_path, {}), runtime, 10)


def older(folder: Path) -> Path:
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    return folder


def a_model(folder: Path) -> Path:
    (folder / "model").mkdir()
    return folder


def another_log(folder: Path) -> Path:
    (folder / "log.jsonl").write_text('{"level": "info"}\n')
    return folder


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file" / "run"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (older, "written by an older version"),
        (a_model, "holds model, but no log.jsonl"),
        (another_log, "is no log of a run"),
        (a_file, "file is a file"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_what_is_not_of_a_run_stays(what, said, resume, tok, data, tmp_path):
    output = what(tmp_path)
    files = lambda: {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    before = files()
    with pytest.raises(CheckpointError, match=said):
        train(tiny(), tok, data, output=output, resume=resume, **QUICK)
    assert files() == before


def test_a_signal_ends_an_evaluation(tok, data, tmp_path, monkeypatch):
    """Before the first step: nothing was learned, so nothing is kept."""

    batches = []

    def placed(*of):
        if not batches:
            os.kill(os.getpid(), signal.SIGTERM)
        batches.append(of)
        return place_batch(*of)

    monkeypatch.setattr("flaxen.train.run.evaluate.place_batch", placed)
    result = train(tiny(), tok, data, eval_data=data, output=tmp_path, **QUICK)
    assert (result.step, result.finished, result.signal) == (0, False, signal.SIGTERM)
    assert len(batches) == 1 and result.rows == []


@pytest.mark.parametrize(("came", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (None, 0)])
def test_the_status_of_the_command_tells_of_ctrl_c(came, code, data, tmp_path, monkeypatch):
    result = Result(None, tmp_path, tmp_path / "log.jsonl", 3, came is None, [], signal=came)
    monkeypatch.setattr("flaxen.cli.train.run", lambda *_, **__: result)
    assert main(["train", "model", str(data)]) == code


def test_runs_leave_no_threads(tok, data, tmp_path):
    """Two one after another, the second in a thread, where no signal comes."""
    settings = QUICK | {"steps": 2, "save_every": 1}
    train(tiny(), tok, data, output=tmp_path / "first", **settings)
    # Other tests' libraries leave watchers of their own.
    before = set(threading.enumerate())
    run = lambda: train(tiny(), tok, data, output=tmp_path / "second", **settings)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert losses(tmp_path / "second") == losses(tmp_path / "first")
    assert set(threading.enumerate()) == before
    assert not [x.name for x in before if "orbax" in x.name.lower() or "ckpt" in x.name.lower()]
