"""Services that keep what they are told: wandb and trackio."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from flaxen.train.run.log import Row
from flaxen.train.run.sinks.sink import Sink, Told, tagged


class Service(Sink):
    """A service in which a run has a name of its own, so that one that goes on adds to its curves.

    What it heard of steps after the checkpoint is not told again: they come to the same numbers. A
    service that is told of a run for the first time hears of all rows so far.
    """

    def __init__(self, told: Told):
        self.label = f"{type(self).__name__.lower()}_run"
        known = told.output / ".reports.json"
        names = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        goes_on = told.step > 0 and self.label in names
        name = names[self.label] if goes_on else f"{_plain(told.name)}-{uuid.uuid4().hex[:6]}"
        before = [*told.log.dropped, *told.answers] if goes_on else []
        self.heard = {_mark(row) for row in before}
        # What they print must not mix with an answer on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            self.run = self.begin(told, name)
        _keep(known, names | {self.label: name})
        if not goes_on:
            for row in told.log.rows():
                self.row(row)

    def begin(self, told: Told, name: str) -> Any:
        raise NotImplementedError

    def tell(self, values: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def row(self, row: Row) -> None:
        if _mark(row) not in self.heard:
            self.tell(tagged(row), row["step"])

    def sample(self, row: Row) -> None:
        if _mark(row) not in self.heard:
            self.answer(row)

    def answer(self, row: Row) -> None:
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.finish(failed)

    def finish(self, failed: bool) -> None:
        self.run.finish()


class Wandb(Service):
    """Weights & Biases. Its own step only grows and is left alone: the axis of every curve is
    `step`.
    """

    package, extra = "wandb", "wandb"

    def begin(self, told: Told, name: str) -> Any:
        wandb: Any = importlib.import_module(self.package)
        run = wandb.init(
            project=told.project,
            name=told.name,
            id=name,
            resume="allow",
            dir=str(told.output),
            config=told.settings,
            allow_val_change=True,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def tell(self, values: dict[str, Any], step: int) -> None:
        self.run.log(values | {"step": step})

    def answer(self, row: Row) -> None:
        wandb: Any = importlib.import_module(self.package)
        told = f"{row['prompt']}\n\n{row['text']}"
        self.run.log({f"samples/{row['number']}": wandb.Html(_page(told)), "step": row["step"]})

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio(Service):
    """Trackio, on this machine."""

    package, extra = "trackio", "trackio"

    def begin(self, told: Told, name: str) -> Any:
        trackio: Any = importlib.import_module(self.package)
        return trackio.init(
            project=told.project, name=name, resume="allow", config=told.settings, embed=False
        )

    def tell(self, values: dict[str, Any], step: int) -> None:
        self.run.log(values, step=step)

    def answer(self, row: Row) -> None:
        self.run.log({f"samples/{row['number']}": row["text"]}, step=row["step"])


def _mark(row: Row) -> tuple[int, Any]:
    """Which row it is: of a step, of its evaluation, or of its n-th answer."""
    return row["step"], row.get("number", "step" if "loss" in row else "evaluation")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:64]


def _page(text: str) -> str:
    import html

    return f"<pre style='white-space:pre-wrap'>{html.escape(text)}</pre>"


def _keep(path: Path, names: dict[str, str]) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(names) + "\n", encoding="utf-8")
    os.replace(aside, path)
