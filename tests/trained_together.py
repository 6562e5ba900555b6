"""One of two processes that train one model by `flaxen train`: PORT INDEX FOLDER STAGE.

FOLDER has source/ and data.jsonl. Stage `begin` does ten steps into whole/, then into killed/,
where both processes are killed at step 6. Stage `go_on` resumes that run, then begins one in
stopped/, of which the second process alone is told to stop, and one of which that one alone has
data with a bad line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import conftest  # noqa: F401  (sets the environment before jax starts)

from flaxen.cli import main as flaxen

FLAGS = [
    *(
        "--full",
        "--batch-size",
        "4",
        "--accumulation",
        "2",
        "--seq-len",
        "8",
        "--mesh",
        "tp=2,fsdp=4",
    ),
    *("--learning-rate", "1e-2", "--neftune-alpha", "5", "--schedule", "constant"),
]


def when_at(step: int, output: Path, kind: signal.Signals) -> None:
    """Send this process a signal once the log has so many steps, and a checkpoint is there if there
    should be one.
    """
    log, saved = output / "log.jsonl", output / "checkpoints" / "step_00000004"

    def watch() -> None:
        while not (log.exists() and log.read_bytes().count(b"\n") >= step):
            time.sleep(0.001)
        while step > 4 and not saved.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), kind)

    threading.Thread(target=watch, daemon=True).start()


def main(port: str, index: str, place: str, stage: str) -> None:
    # Read when the first device is asked for.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    folder = Path(place)
    together = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", index]

    def train(
        output: str,
        *more: str,
        steps: str = "10",
        save_every: str = "4",
        data: str = "data.jsonl",
    ) -> int:
        where = [str(folder / "source"), str(folder / data), "--output"]
        often = ["--steps", steps, "--save-every", save_every]
        return flaxen(["train", *where, str(folder / output), *FLAGS, *often, *together, *more])

    if stage == "begin":
        assert train("whole") == 0
        when_at(6, folder / "killed", signal.SIGKILL)
        train("killed")
    assert train("killed", "--resume") == 0
    if index == "1":
        when_at(2, folder / "stopped", signal.SIGTERM)
    code = train("stopped", steps="1000", save_every="0")
    (folder / f"stopped-{index}.json").write_text(json.dumps(code))
    train("bad", data="bad.jsonl" if index == "1" else "data.jsonl")


if __name__ == "__main__":
    main(*sys.argv[1:])
