"""`flaxen doctor`: would it load, is it understood in full, does it fit."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

from flaxen import __version__
from flaxen.cli.options import Count, Json, Loading, Source, about, enough_cpu_devices
from flaxen.cli.output import print_json
from flaxen.cli.show import planned

if TYPE_CHECKING:
    from flaxen.model import Model

PACKAGES = ("jax", "jaxlib", "numpy", "transformers", "safetensors", "ml_dtypes")


def doctor(
    model: Source,
    *,
    length: Annotated[Count, about("Tokens of context that should fit too.")] = 2048,
    loading: Loading = Loading(),
    json: Json = False,
) -> int:
    """Tell whether a model loads, is understood in full, and fits.

    Only headers are read. The exit status is 1 if something is missing or does not fit.
    """
    enough_cpu_devices(loading.mesh)
    options = {"abstract": True, "strict": False, "scan_layers": False}
    abstract = Loading(dtype=loading.dtype).load(model, **options)
    assert abstract.loading is not None
    found = {
        "environment": environment(),
        "checkpoint": dataclasses.asdict(abstract.loading),
        "memory": memory(abstract, loading, length),
    }
    problems = problems_in(found)
    if json:
        print_json({**found, "problems": problems})
    else:
        _print(found, problems)
    return int(bool(problems))


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
    per_token = cache_bytes_per_token(abstract.module, itemsize)
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
        "untied": "tensors differ from those that the config ties them to",
        "unread": "config keys were not understood",
    }
    problems = [f"{len(report[key])} {text}" for key, text in said.items() if report.get(key)]
    if sizes["weights"] + sizes["cache"] > sizes["available"]:
        problems.append("weights and cache do not fit into a device's memory")
    return problems


def _print(found: dict[str, Any], problems: list[str]) -> None:
    from rich.console import Console

    from flaxen.show import human_bytes, table

    console = Console()
    console.print(table(["environment", ""], found["environment"].items()))
    console.print(table(["checkpoint", ""], _listed(found["checkpoint"])))
    sizes = ((name.replace("_", " "), human_bytes(n)) for name, n in found["memory"].items())
    console.print(table(["memory on a device", ""], sizes))
    for problem in problems:
        console.print(f"[bold red]✗[/] {problem}")
    if not problems:
        console.print("[bold green]✓[/] loads, is understood in full, and fits")


def _listed(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in report.items():
        if isinstance(value, dict):
            value = [f"{key}: {each}" for key, each in value.items()]
        elif not isinstance(value, list | tuple | set | frozenset):
            value = [str(value)]
        shown = [str(each) for each in value]
        more = [f"... {len(shown) - 10} more"] if len(shown) > 10 else []
        rows.append((name.replace("_", " "), "\n".join([*shown[:10], *more]) or "none"))
    return rows
