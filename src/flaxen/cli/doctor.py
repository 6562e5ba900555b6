"""`flaxen doctor`: would it load, is it understood in full, does it fit."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

from flaxen import __version__
from flaxen.cli.options import (
    Count,
    Download,
    Json,
    Loading,
    Source,
    about,
    enough_cpu_devices,
    from_afar,
)
from flaxen.cli.output import print_json, print_mark, print_out
from flaxen.cli.show import planned
from flaxen.core.errors import FlaxenError

if TYPE_CHECKING:
    from flaxen.model import Model

TITLES = {"memory": "memory on a device"}

PACKAGES = ("jax", "jaxlib", "numpy", "transformers", "safetensors", "ml_dtypes")


def doctor(
    model: Source,
    *,
    length: Annotated[Count, about("Tokens of context that should fit too.")] = 2048,
    read: Annotated[bool, about("Read every value: NaN, infinity, constant weights.")] = False,
    download: Download = False,
    loading: Loading = Loading(),
    json: Json = False,
) -> int:
    """Tell whether a model loads, is understood in full, and fits.

    Only headers are read, unless --read asks for every value. The exit status is 1 if something is
    missing, does not go together or does not fit.
    """
    from flaxen.cli import checkup
    from flaxen.convert.formats.checkpoint import open_checkpoint

    enough_cpu_devices(loading.mesh)
    remote = from_afar(download)
    checkpoint = open_checkpoint(model, revision=loading.revision, remote=remote)
    about, problems = checkup.tokenizer(model, loading.revision, checkpoint.config)
    found = {
        "environment": environment(),
        "files": checkup.files(checkpoint),
        "tokenizer": about,
        **_loaded(model, loading, download, length, problems),
    }
    if read:
        problems += checkup.values(checkpoint)
    if json:
        print_json({**found, "problems": problems})
    else:
        _print(found, problems)
    return int(bool(problems))


def _loaded(
    model: str, loading: Loading, download: bool, length: int, problems: list[str]
) -> dict[str, Any]:
    """How the checkpoint fits its model, and that the memory; what is wrong joins `problems`."""
    try:
        abstract = loading.look(model, download, strict=False, ignore_mismatched_sizes=True)
    except FlaxenError as error:
        problems.append(str(error))
        return {}
    assert abstract.loading is not None
    found = {
        "checkpoint": dataclasses.asdict(abstract.loading),
        "memory": memory(abstract, loading, length),
    }
    problems += problems_in(found)
    return found


def environment() -> dict[str, str]:
    """Versions, and what jax runs on."""
    import jax

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "flaxen": __version__,
        **{name: version(name) for name in PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    }


def memory(abstract: Model, loading: Loading, length: int) -> dict[str, int]:
    """Bytes on one device: weights, a cache for `length` tokens, and what the device has."""
    from flaxen.show import cache_bytes_per_token, device_memory, parts

    tree = parts(abstract.module, planned(loading.mesh, loading.plan))
    itemsize = tree.nbytes // tree.parameters
    per_token = cache_bytes_per_token(abstract.module, itemsize) if abstract.can_generate() else 0
    return {
        "weights": tree.device_bytes,
        "cache_per_token": per_token,
        "cache": per_token * length,
        "available": device_memory(),
    }


def problems_in(found: dict[str, Any]) -> list[str]:
    """What stands in the way, in words."""
    report, sizes = found["checkpoint"], found["memory"]
    said = {
        "missing": "tensors are missing",
        "mismatched": "tensors have another shape than the config says",
        "unexpected": "tensors belong to no part of the model",
        "errors": "tensors cannot be made of those in the file",
        "untied": "tensors differ from those that the config ties them to",
        "unread": "config keys were not understood",
    }
    problems = [f"{len(report[key])} {text}" for key, text in said.items() if report.get(key)]
    if sizes["weights"] + sizes["cache"] > sizes["available"]:
        problems.append("weights and cache do not fit into a device's memory")
    return problems


def _print(found: dict[str, Any], problems: list[str]) -> None:
    from flaxen.show import table

    for name, facts in found.items():
        print_out(table([TITLES.get(name, name), ""], _listed(facts, name == "memory")))
    for problem in problems:
        print_mark(False, problem)
    if not problems:
        print_mark(True, "loads, is understood in full, and fits")


def _listed(about: dict[str, Any], sizes: bool) -> list[tuple[str, str]]:
    """Rows of a table; what is empty is left out."""
    from flaxen.convert.report import fold
    from flaxen.show import human_bytes

    rows = []
    for name, value in about.items():
        if name == "mismatched":
            value = [f"{n}: found {list(has)}, expected {list(is_)}" for n, has, is_ in value]
        elif name in ("missing", "unexpected"):
            value = fold(value)
        elif isinstance(value, dict):
            value = [f"{key}: {each}" for key, each in value.items()]
        elif not isinstance(value, list | tuple | set | frozenset):
            value = [] if value in (None, 0, 0.0) else [human_bytes(value) if sizes else value]
        shown = [str(each) for each in value]
        more = [f"... {len(shown) - 10} more"] if len(shown) > 10 else []
        if shown:
            rows.append((name.replace("_", " "), "\n".join([*shown[:10], *more])))
    return rows or [("nothing unusual", "")]
