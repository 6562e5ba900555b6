"""Whoever is told of a run besides its log, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flaxen.core.errors import ConfigError
from flaxen.core.registry import Registry
from flaxen.train.run.sinks.csv_file import CsvFile
from flaxen.train.run.sinks.service import Trackio, Wandb
from flaxen.train.run.sinks.sink import Guarded, Sink, Told
from flaxen.train.run.sinks.tensorboard import TensorBoard
from flaxen.train.settings import TrainConfig

SINKS: Registry[type[Sink]] = Registry("sink in report_to")
SINKS.register("tensorboard", TensorBoard)
SINKS.register("wandb", Wandb)
SINKS.register("trackio", Trackio)


def check_sinks(config: TrainConfig) -> None:
    """
    Raises:
        ConfigError: an unknown name in `report_to`, or one whose package is absent.
    """
    for name in config.sinks():
        SINKS[name].check(name)


@contextmanager
def open_sinks(names: list[str], told: Told) -> Iterator[None]:
    """The log tells these, and its table, while the context lasts.

    Raises:
        ConfigError: one cannot be begun.
    """
    with ExitStack() as stack:
        for name, kind in {"log.csv": CsvFile, **{name: SINKS[name] for name in names}}.items():
            sink = Guarded(name, _begun(name, kind, told))
            told.log.listeners.append(sink)
            stack.push(lambda kind, *_, sink=sink: sink.close(kind is not None))
        yield


def _begun(name: str, kind: type[Sink], told: Told) -> Sink:
    try:
        return kind(told)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be begun: {type(error).__name__}: {error}. Mend that, or leave it out "
            "of report_to."
        ) from error


__all__ = ["SINKS", "Guarded", "Sink", "Told", "check_sinks", "open_sinks"]
