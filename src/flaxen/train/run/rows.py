"""The log of a run, one step behind the device."""

from __future__ import annotations

import time
from typing import Any

import jax

from flaxen.core.errors import FlaxenError
from flaxen.train.run.costs import Costs
from flaxen.train.run.log import Log, Report


class Rows:
    """A step's numbers are read when the next step is already under way."""

    def __init__(
        self, log: Log, per_epoch: int, reports: list[Report], patience: int, costs: Costs
    ):
        self.log, self.per_epoch, self.reports, self.patience = log, per_epoch, reports, patience
        self.costs = costs
        self.waiting: tuple[int, Any, float | None] | None = None
        self.before = time.perf_counter()

    def add(self, step: int, metrics: Any, batch: Any) -> None:
        self.settle()
        self.waiting = step, metrics, self.costs.flops(batch)

    def settle(self) -> None:
        """Write the row of the step that is still out.

        Raises:
            FlaxenError: too many gradients in a row that are not finite.
        """
        if self.waiting is None:
            return
        (step, metrics, flops), self.waiting = self.waiting, None
        numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self.before = now - self.before, now
        bad, tokens, skipped = (int(numbers.pop(key)) for key in ("bad", "tokens", "skipped"))
        row = {"step": step, "epoch": step / self.per_epoch, **numbers, "tokens": tokens}
        row |= {"skipped": skipped} if skipped else {}
        row |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
        row |= self.costs.told(flops, seconds)
        self.log.write(row)
        for report in self.reports:
            report(row)
        if bad >= self.patience:
            raise FlaxenError(
                f"The gradient was not finite {bad} steps in a row, up to step {step}; those steps "
                "changed no weight. Lower the learning rate, look at their data, or compute in "
                "float32."
            )

    def pause(self) -> None:
        """Leave out the time since the last row."""
        self.before = time.perf_counter()
