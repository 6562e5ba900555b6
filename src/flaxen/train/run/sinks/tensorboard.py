"""TensorBoard, by files of tensorboardX."""

from __future__ import annotations

from typing import Any

from flaxen.train.run.log import Row
from flaxen.train.run.sinks.sink import Sink, Told, tagged


class TensorBoard(Sink):
    """Files in `output`/tensorboard; TensorBoard itself hides what comes after the step from which
    a run goes on.
    """

    package, extra = "tensorboardX", "tensorboard"

    def __init__(self, told: Told):
        from tensorboardX import SummaryWriter

        folder = told.output / "tensorboard"
        new = not folder.exists()
        more: dict[str, Any] = {} if new else {"purge_step": told.step + 1}
        self.writer = SummaryWriter(str(folder), flush_secs=10, **more)
        settings = [f"| {key} | {value} |" for key, value in told.settings.items()]
        self.writer.add_text("settings", "\n".join(["| | |", "|-|-|", *settings]), told.step)
        for row in told.log.rows() if new else ():
            self.row(row)

    def row(self, row: Row) -> None:
        for name, value in tagged(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def sample(self, row: Row) -> None:
        self.writer.add_text(row["prompt"][:80], row["text"], row["step"])

    def close(self, failed: bool) -> None:
        self.writer.close()
