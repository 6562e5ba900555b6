"""The seam between a run's log and whoever else is told."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from flaxen.core.errors import ConfigError
from flaxen.train.run.log import Log, Row


@dataclasses.dataclass(frozen=True)
class Told:
    """What a sink is told before the first row. log: with the rows of the run so far; answers: to
    sample prompts so far, with those after `step`; settings: as JSON has them.
    """

    output: Path
    project: str
    name: str
    settings: dict[str, Any]
    log: Log
    step: int
    answers: list[Row] = dataclasses.field(default_factory=list)


class Sink:
    """Somewhere that numbers of a run go.

    One that keeps what it was told (`keeps`) is not told again what it heard before a run went on
    from an earlier checkpoint: these steps are computed again, to the same numbers.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""

    def __init__(self, told: Told):
        raise NotImplementedError

    def row(self, row: Row) -> None:
        """Be told of a step or an evaluation."""

    def sample(self, row: Row) -> None:
        """Be told of an answer."""

    def close(self, failed: bool) -> None:
        """The run is over."""

    @classmethod
    def check(cls, name: str) -> None:
        """
        Raises:
            ConfigError: its package is absent.
        """
        if cls.package and importlib.util.find_spec(cls.package) is None:
            raise ConfigError(
                f"report_to names {name!r}, which needs {cls.package}: "
                f"pip install 'flaxen[{cls.extra}]'"
            )


class Guarded:
    """A sink whose troubles do not end a run: the first one is told, and it is tried again."""

    def __init__(self, name: str, sink: Sink):
        self.name, self.sink, self.failed = name, sink, False

    def row(self, row: Row) -> None:
        self._try(self.sink.row, row)

    def sample(self, row: Row) -> None:
        self._try(self.sink.sample, row)

    def close(self, failed: bool) -> None:
        self._try(self.sink.close, failed)

    def _try(self, call: Callable[[Any], None], value: Any) -> None:
        try:
            call(value)
        except Exception as error:
            if not self.failed:
                self.failed = True
                warnings.warn(
                    f"{self.name} does not take what the run tells it: "
                    f"{type(error).__name__}: {error}. The run goes on; log.jsonl has all of it.",
                    RuntimeWarning,
                    stacklevel=2,
                )


def tagged(row: Row) -> dict[str, float]:
    """The numbers of a row under names of two parts: train/loss, eval/loss, eval/perplexity."""
    tests = any(key.startswith("eval_") for key in row)
    side = "eval" if tests else "train"
    return {
        f"{side}/{key.removeprefix('eval_')}": value for key, value in row.items() if key != "step"
    }
