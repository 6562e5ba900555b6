"""Who watches a run: all that its log tells of what is written into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flaxen.train.run.costs import Costs
from flaxen.train.run.display import display
from flaxen.train.run.log import Log, read_rows
from flaxen.train.run.prepare import Run
from flaxen.train.run.samples import ANSWERS
from flaxen.train.run.sinks import Told, open_sinks
from flaxen.train.settings.field import plain


@contextmanager
def watched(run: Run, log: Log) -> Iterator[None]:
    """While it lasts, a run's log tells all who watch. Of several processes, the first one tells.

    Raises:
        ConfigError: a sink cannot be begun; nothing was computed then.
    """
    config, output = run.config, run.output
    if not log.first:
        yield
        return
    settings = {name: plain(value) for name, value in vars(config).items()}
    name = config.run_name or output.resolve().name
    answers = read_rows(output / ANSWERS)
    told = Told(output, config.project, name, settings, log, run.step, answers)
    with (
        open_sinks(config.sinks(), told),
        display(run.steps, run.step, config.log_every, config.progress) as shown,
    ):
        log.listeners += shown
        yield


def costs_of(run: Run) -> Costs:
    """What a step of this run costs, with the peak that its settings ask for."""
    return Costs(run.tree, run.runtime, run.config.peak(), run.config.dtype)
