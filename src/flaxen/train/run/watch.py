"""Opening a run's log, and telling all who watch of what is written into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from flaxen.train.run.costs import Costs
from flaxen.train.run.display import display
from flaxen.train.run.log import Log
from flaxen.train.run.prepare import Run
from flaxen.train.run.sinks import Told, open_sinks
from flaxen.train.settings.field import plain


@contextmanager
def watched(run: Run) -> Iterator[Log]:
    """The log of a run. Of several processes, the first one tells.

    Raises:
        ConfigError: a sink cannot be begun; nothing was computed then.
    """
    config, output = run.config, run.output
    output.mkdir(parents=True, exist_ok=True)
    log = Log(output / "log.jsonl", run.step)
    if jax.process_index() > 0:
        yield log
        return
    settings = {name: plain(value) for name, value in vars(config).items()}
    name = config.run_name or output.resolve().name
    told = Told(output, config.project, name, settings, log, run.step)
    with (
        open_sinks(config.sinks(), told),
        display(run.steps, run.step, config.log_every, config.progress) as shown,
    ):
        log.listeners += shown
        yield log


def costs_of(run: Run) -> Costs:
    """What a step of this run costs, with the peak that its settings ask for."""
    return Costs(run.tree, run.runtime, run.config.peak(), run.config.dtype)
