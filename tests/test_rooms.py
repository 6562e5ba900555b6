"""Imports only point up the list of rooms in docs/architecture.md, those inside functions too."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flaxen

SOURCE = Path(flaxen.__file__).parent
FRONT_DOOR = "front door"
DOORS = (
    "model",
    "calling",
    "running",
    "continuing",
    "edit",
    "fit",
    "fresh",
    "adapter",
    "target",
    "pretrained",
    "export",
    "reshard",
)

ROOMS = [
    "core",
    "convert",
    "shard",
    "attention",
    "cache",
    "layers",
    "models",
    "families",
    "quantize",
    "text",
    "image",
    "generate",
    "speech",
    "embed",
    "tune",
    "show",
    "train",
    "plan",
    FRONT_DOOR,
    "cli",
    "easydel",
]

# A lineage's file is imported for its own configs only, by the registry.
LINEAGES = {f"flaxen.families.{file}" for file in flaxen.families.FILES.values()}

# They cost from a tenth of a second to some seconds: imported by the functions that use them.
HEAVY = {
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "gguf",
    "optax",
    "grain",
    "pyarrow",
    "datasets",
    "matplotlib",
    "rich",
    "PIL",
    "tensorboardX",
    "wandb",
    "trackio",
}


def room_of(module: str) -> str:
    """flaxen.layers.rope -> layers; flaxen.model -> front door; flaxen.__main__ -> cli."""
    name = module.split(".")[1]
    if name == "__main__":
        return "cli"
    return FRONT_DOOR if name in DOORS else name


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a piece of code imports, in full: `flaxen.core.tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "flaxen":
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            yield from (flaxen._HOME.get(name, f"flaxen.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = re.search(r"[\w.]+", ast.unparse(node.args[0]).removeprefix("f"))
            yield from [name.group()] if name else []


def wrong_arrows(code: str, module: str) -> list[str]:
    """What a module imports although it stands below it."""
    here = room_of(module)
    found = []
    for target in imported(ast.parse(code)):
        if target.split(".")[0] != "flaxen" or target == "flaxen":
            continue
        there = room_of(target)
        below = ROOMS.index(there) > ROOMS.index(here)
        reaches_into_families = here != "families" and target in LINEAGES
        if below or reaches_into_families:
            found.append(f"{module} imports {target}")
    return found


@functools.cache
def modules() -> dict[str, Path]:
    found = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
    del found["flaxen"]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_up(room: str):
    mine = {name: path for name, path in modules().items() if room_of(name) == room}
    assert [
        arrow for name, path in mine.items() for arrow in wrong_arrows(path.read_text(), name)
    ] == []


def test_every_module_belongs_to_a_room():
    assert {room_of(name) for name in modules()} <= set(ROOMS)


def test_the_registry_imports_families_only_when_asked():
    registry = ast.parse((SOURCE / "families" / "__init__.py").read_text())
    at_once = ast.Module([node for node in registry.body if not _is_definition(node)], [])
    assert LINEAGES.isdisjoint(imported(at_once))


@pytest.mark.parametrize("name", modules())
def test_heavy_packages_are_imported_by_the_functions_that_use_them(name: str):
    body = ast.parse(modules()[name].read_text()).body
    top = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {m.split(".")[0] for m in imported(ast.Module(top, []))}
    assert names & HEAVY == set()


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("flaxen.core.dot", "from flaxen.layers import linear"),
        ("flaxen.core.dot", "import flaxen.layers.linear"),
        ("flaxen.core.dot", "def f():\n    from flaxen import load"),
        ("flaxen.core.dot", "def f():\n    import_module('flaxen.train.run.loop')"),
        ("flaxen.train.run.loop", "from flaxen.model import Model"),
        ("flaxen.train", "from flaxen import generate, cli"),
        ("flaxen.generate.loop", "from flaxen.families.llama import llama"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, code: str):
    assert len(wrong_arrows(code, module)) == 1


@pytest.mark.parametrize(
    ("module", "code"),
    [
        (
            "flaxen.layers.mlp",
            "from flaxen.core.tree import module\nfrom flaxen.layers import linear",
        ),
        ("flaxen.families.qwen", "from flaxen.families.llama import llama"),
        ("flaxen.cli.generate", "def f():\n    from flaxen import load"),
        ("flaxen.pretrained", "from flaxen.families import family_of"),
    ],
)
def test_a_right_arrow_is_left_alone(module: str, code: str):
    assert wrong_arrows(code, module) == []
