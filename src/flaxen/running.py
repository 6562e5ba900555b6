"""How a model is run: from arguments, and from the file beside its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flaxen.attention import AttentionSettings, runnable
from flaxen.cache import CacheSettings
from flaxen.cache.settings import LAYOUTS
from flaxen.core.errors import ConfigError
from flaxen.core.platform import platform
from flaxen.layers.checkpointing import Checkpointing, checkpointing_of
from flaxen.layers.runtime import FILE, PLAIN, Runtime
from flaxen.shard import Plan, placement_on


def runtime_of(
    runtime: Runtime | str | Path | None = None,
    *,
    mesh: Any = None,
    plan: str | Plan | None = None,
    attention: AttentionSettings | str | None = None,
    scan_layers: bool | None = None,
    remat: bool | str | Checkpointing = False,
    cache: CacheSettings | str | None = None,
) -> Runtime:
    """A runtime (or one in a folder), with what is given besides in place of what it says.

    Raises:
        ConfigError, PlanError: as `Runtime` does; or a folder without one.
    """
    base = runtime if isinstance(runtime, Runtime) else PLAIN
    if isinstance(runtime, str | Path):
        base = read_runtime(runtime)
    placement = placement_on(mesh, plan)
    changes: dict[str, Any] = {} if placement is None else {"placement": placement}
    if attention is not None:
        given = isinstance(attention, AttentionSettings)
        changes["attention"] = (
            attention if given else dataclasses.replace(base.attention, mechanism=attention)
        )
    if scan_layers is not None:
        changes["scan_layers"] = scan_layers
    if remat:
        changes["checkpointing"] = checkpointing_of(remat)
    if cache is not None:
        changes["cache"] = _cache(base.cache, cache)
    made = dataclasses.replace(base, **changes)
    if made.placement is not None:
        made.placement.mesh.size  # noqa: B018  (sizes that do not divide are refused here)
    runnable(made.attention, platform())
    return made


def _cache(base: CacheSettings, cache: CacheSettings | str) -> CacheSettings:
    """The settings themselves, or by the name of a layout or of a codec."""
    if isinstance(cache, CacheSettings):
        return cache
    if cache in LAYOUTS:
        return dataclasses.replace(base, layout=cache)
    return dataclasses.replace(base, codec=cache)


def read_runtime(path: str | Path) -> Runtime:
    """The runtime in a folder, or in a file.

    Raises:
        ConfigError: there is none, or it cannot be followed.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}. Save with runtime=True to have one."
        ) from None
    return Runtime.from_json(text)
