"""Services that write down what they are told, in place of those on a network."""

from __future__ import annotations

import struct
import types
from pathlib import Path
from typing import Any

import pytest


class Service:
    """Stands in for `wandb` or `trackio`: each `init` begins or goes on with a run by its id."""

    def __init__(self) -> None:
        self.began: list[dict[str, Any]] = []
        self.told: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.ended: list[int] = []

    def init(self, **given: Any) -> Run:
        self.began.append(given)
        name = given.get("id", given["name"])
        self.told.setdefault(name, [])
        return Run(self, name)


class Run:
    def __init__(self, service: Service, name: str):
        self.service, self.name = service, name
        self.axes: list[tuple[str, str | None]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        at = values["step"] if step is None else step
        self.service.told[self.name].append((at, values))

    def finish(self, exit_code: int = 0) -> None:
        self.service.ended.append(exit_code)


def stand_in(patch: pytest.MonkeyPatch, name: str) -> Service:
    """A service under a package's name, as if that were installed."""
    service = Service()
    module = types.ModuleType(name)
    spec = types.SimpleNamespace(name=name)
    vars(module).update(init=service.init, Html=str, __spec__=spec)
    patch.setitem(__import__("sys").modules, name, module)
    return service


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard would draw: tag, step and value of each file in turn, without what a later
    file takes back.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: list[tuple[str, int, float]] = []
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        while raw:
            (size,) = struct.unpack("<Q", raw[:8])
            event = Event.FromString(raw[12 : 12 + size])
            raw = raw[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = [each for each in found if each[1] < event.step]
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.append((value.tag, event.step, value.simple_value))
    return found
