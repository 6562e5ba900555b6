"""Whole runs: what they write, and that an interrupted one goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import interrupted_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupted_run import SETTINGS
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from stored_state import stored_state
from tiny_decoder import tiny
from words import word_tokenizer

from flaxen.core.errors import CheckpointError, ConfigError, FlaxenError
from flaxen.core.tree import paths
from flaxen.shard import make_mesh
from flaxen.train import TrainConfig, train
from flaxen.train.checkpoint import Checkpoints, checksum

SCRIPT = Path(interrupted_run.__file__)


@pytest.fixture(scope="module")
def tok():
    return word_tokenizer(90)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents that repeat a pattern, of 3 to 12 words."""
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        start, length = int(draw.integers(10, 80)), int(draw.integers(3, 12))
        lines.append({"text": " ".join(f"w{start + i % 3}" for i in range(length))})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def whole(tok, data, tmp_path_factory):
    """Ten steps without a pause."""
    output = tmp_path_factory.mktemp("whole")
    return train(tiny(), tok, data, output=output, eval_data=data, eval_every=5, **SETTINGS)


def losses(output: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_a_run_learns_and_says_so(whole):
    assert whole.finished
    assert sorted(whole.perplexities) == [0, 5, 10]
    assert whole.perplexities[10] < whole.perplexities[5] < whole.perplexities[0]
    assert [step for step, _ in losses(whole.output)] == list(range(1, 11))
    row = whole.rows[1]
    assert row["tokens"] > 0
    assert row.keys() >= {"loss", "grad_norm", "lr", "epoch", "seconds", "tokens_per_second"}


def test_a_run_exports_model_adapter_and_picture(whole):
    exported = load_file(whole.model_path / "model.safetensors")
    for path, leaf in paths(whole.model.module).items():
        np.testing.assert_array_equal(exported[path], leaf)
    assert (whole.adapter_path / "adapter_model.safetensors").exists()
    assert whole.picture_path.stat().st_size > 1000


def test_old_checkpoints_are_removed(whole):
    names = sorted(path.name for path in (whole.output / "checkpoints").iterdir())
    assert names == ["step_00000008", "step_00000010"]


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_bit_by_bit(whole, tok, data, tmp_path):
    """Killed after step 6, it goes on from the checkpoint of step 4."""
    command = [sys.executable, SCRIPT, tmp_path, data, "6"]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [step for step, _ in losses(tmp_path)][-1] == 6
    result = train(tiny(), tok, data, output=tmp_path, resume=True, **SETTINGS)
    assert result.finished
    assert losses(tmp_path) == losses(whole.output)
    want, got = stored_state(whole.output, 10), stored_state(tmp_path, 10)
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint(kind: signal.Signals, tok, data, tmp_path):
    before = signal.getsignal(kind)

    def on_step(row):
        if row["step"] == 2:
            os.kill(os.getpid(), kind)

    settings = SETTINGS | {"accumulation": 1, "lora_targets": ["q_proj"]}
    result = train(tiny(), tok, data, output=tmp_path, on_step=on_step, **settings)
    assert not result.finished
    assert 2 <= result.step < 10
    assert [step for step, _ in losses(tmp_path)][-1] == result.step
    assert Checkpoints(tmp_path / "checkpoints", {}).steps()[-1] == result.step
    assert not (tmp_path / "model").exists()
    assert signal.getsignal(kind) == before


def test_another_run_is_not_overwritten(whole, tok, data):
    with pytest.raises(CheckpointError, match="is at step 10"):
        train(tiny(), tok, data, output=whole.output, **SETTINGS)


def test_resuming_with_other_settings_lists_them(whole, tok, data, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a b c"}\n')
    changed = SETTINGS | {"accumulation": 1, "seed": 7}
    with pytest.raises(CheckpointError) as error:
        train(tiny("mistral"), tok, other, output=whole.output, resume=True, **changed)
    text = str(error.value)
    assert "accumulation: found 2, expected 1" in text
    assert "seed: found 0, expected 7" in text
    assert "data: found " in text
    assert "model: found " in text


def test_a_checkpoint_loads_onto_another_mesh(tmp_path):
    mesh = make_mesh("fsdp=4,tp=2")
    numbers, count = np.arange(64, dtype=np.float32).reshape(8, 8), np.int32(7)
    lay = lambda *spec: {
        "weight": jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(*spec))),
        "count": jax.device_put(count, NamedSharding(mesh, PartitionSpec())),
    }
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(3, lay("fsdp", "tp"))
    checkpoints.wait()
    for like in (
        lay("tp"),
        lay(None, ("fsdp", "tp")),
        {"weight": jnp.zeros((8, 8)), "count": count + jnp.int32(0)},
    ):
        step, back = checkpoints.restore(like=like)
        assert step == 3
        assert back["weight"].sharding == like["weight"].sharding
        np.testing.assert_array_equal(back["weight"], numbers)
        np.testing.assert_array_equal(back["count"], count)


def test_a_model_has_the_same_checksum_on_any_mesh():
    numbers = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    cut = NamedSharding(make_mesh("fsdp=4,tp=2"), PartitionSpec("fsdp", "tp"))
    plain = checksum({"weight": jnp.asarray(numbers)})
    assert checksum({"weight": jax.device_put(numbers, cut)}) == plain
    assert checksum({"weight": jnp.asarray(numbers).at[3, 3].add(1e-6)}) != plain


def saved(folder: Path, module) -> Path:
    checkpoints = Checkpoints(folder, {})
    target = checkpoints.save(1, module)
    checkpoints.close()
    return target


def test_a_checkpoint_that_was_not_finished_is_not_seen(tmp_path):
    saved(tmp_path, tiny().module)
    (tmp_path / "step_00000002.orbax-checkpoint-tmp-7").mkdir()
    assert Checkpoints(tmp_path, {}).steps() == [1]


def damage_array(folder: Path) -> None:
    for file in (folder / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-8])


def lose_about(folder: Path) -> None:
    (folder / "about" / "metadata").unlink()


@pytest.mark.parametrize("damage", [damage_array, lose_about])
def test_a_damaged_checkpoint_is_named(damage, tmp_path):
    # One array: others whose reading has begun would complain of the first's end later.
    state = {"weight": jnp.ones((64, 64))}
    damage(saved(tmp_path, state))
    with pytest.raises(CheckpointError, match=r"step_00000001 cannot be read"):
        Checkpoints(tmp_path, {}).restore(like=state)


def test_a_checkpoint_that_says_nothing_of_itself_is_named(tmp_path):
    state = {"weight": jnp.ones(2)}
    (saved(tmp_path, state) / "about" / "metadata").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="step_00000001 does not say its settings"):
        Checkpoints(tmp_path, {}).restore(like=state)


def test_one_bit_of_a_weight_that_turned_is_seen(tmp_path):
    state = {"weight": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    files = (saved(tmp_path, state) / "state" / "ocdbt.process_0" / "d").iterdir()
    values = max(files, key=lambda file: file.stat().st_size)
    raw = bytearray(values.read_bytes())
    raw[len(raw) // 2] ^= 1
    values.write_bytes(raw)
    with pytest.raises(CheckpointError, match="step_00000001 holds other numbers than"):
        Checkpoints(tmp_path, {}).restore(like=state)


def test_weights_may_change_while_a_checkpoint_is_written(tmp_path):
    """The step after it takes the memory of what is being written."""
    checkpoints = Checkpoints(tmp_path, {})
    advance = jax.jit(lambda x: {"w": x["w"] + 1}, donate_argnums=0)
    state = {"w": jnp.zeros((512, 512))}
    for step in range(4):
        checkpoints.save(step, state)
        for _ in range(3):
            state = advance(state)
    checkpoints.close()
    for step in (2, 3):
        got = Checkpoints(tmp_path, {}).restore(like={"w": jnp.zeros((512, 512))}, step=step)[1]
        np.testing.assert_array_equal(got["w"], 3.0 * step)


def test_the_best_checkpoints_stay_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, {}, keep=1, keep_best=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, np.inf]):
        checkpoints.save(step, {"w": jnp.float32(step)}, loss=loss)
    checkpoints.close()
    assert Checkpoints(tmp_path, {}).steps() == [1, 2, 4]


def test_ten_bad_gradients_in_a_row_end_a_run(tok, data, tmp_path):
    settings = SETTINGS | {"steps": 30, "accumulation": 1, "lora_targets": ["q_proj"]}
    model = tiny()
    broken = model.replace(module=_with_nan(model.module))
    with pytest.raises(FlaxenError, match="not finite 10 steps in a row, up to step 10"):
        train(broken, tok, data, output=tmp_path, **settings)


def _with_nan(tree):
    norm = dataclasses.replace(tree.norm, weight=tree.norm.weight * np.nan)
    return dataclasses.replace(tree, norm=norm)


def test_settings_out_of_range_are_listed():
    with pytest.raises(ConfigError, match=r"batch_size is 0.*clip is -1"):
        TrainConfig(output="x", batch_size=0, clip=-1)
